// An agent with three tools: URL MODEL generate|stream PROMPT. Prints JSON: texts, results and uses of its steps.
import fs from 'node:fs';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const [url, model, way, prompt] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: 'cairn', baseURL: url, apiKey: process.env.CAIRN_API_KEY, includeUsage: true,
});
const name = z.string().describe('The name of a file.');
const tools = {
  write_file: tool({
    description: 'Writes a file.', inputSchema: z.object({ name, text: z.string() }),
    execute: async ({ name, text }) => { fs.writeFileSync(name, text); return 'written'; },
  }),
  read_file: tool({
    description: 'Reads a file.', inputSchema: z.object({ name }),
    execute: async ({ name }) => fs.readFileSync(name, 'utf8'),
  }),
  list_files: tool({
    description: 'Lists the files.', inputSchema: z.object({}), execute: async () => fs.readdirSync('.'),
  }),
};
const asked = {
  model: provider(model), tools, prompt, system: 'You work with files. '.repeat(40), stopWhen: stepCountIs(8), maxRetries: 0,
};
let steps;
if (way === 'generate') {
  steps = (await generateText(asked)).steps;
} else {
  const streamed = streamText({ ...asked, onError: ({ error }) => { throw error; } });
  await streamed.consumeStream();
  steps = await streamed.steps;
}
console.log(JSON.stringify({
  texts: steps.map(step => step.text),
  results: steps.flatMap(step => step.toolResults.map(result => result.output)),
  uses: steps.map(step => step.usage),
}));
