"""Chat templates in the forms that published models have, and a chat of an agent that works with tools."""

import json
import shutil
from pathlib import Path
from typing import Any

from cairn.engine.text.tokenizer import ModelTokenizer

Messages = list[dict[str, Any]]

TOOLS: Messages = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name.replace('_', ' ')}.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
    for name in ("read_file", "list_folder", "run_tests")
]

# Tools in the system turn; reasoning only behind the last question of the user; tool results of one round in one turn
# of the user; `enable_thinking` false closes the reasoning in the suffix.
DROPS_REASONING = """\
{%- macro text(content) -%}
{%- if content is string -%}{{- content -}}
{%- else -%}{%- for part in content or [] -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text -}}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
{{- '<|im_start|>system\\n# Tools\\n\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' -}}{{- tool | tojson -}}{%- endfor -%}
{{- '\\n</tools>\\n\\nAnswer with <tool_call>...</tool_call> to call one.' -}}
{%- if messages[0].role == 'system' and text(messages[0].content) -%}
{{- '\\n\\n' + text(messages[0].content) | trim -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
{{- '<|im_start|>system\\n' + text(messages[0].content) | trim + '<|im_end|>\\n' -}}
{%- endif -%}
{%- set last = namespace(query=messages|length - 1, looking=true) -%}
{%- for message in messages[::-1] -%}
{%- set index = messages|length - 1 - loop.index0 -%}
{%- if last.looking and message.role == 'user' -%}
{%- set content = text(message.content) | trim -%}
{%- if not (content.startswith('<tool_response>') and content.endswith('</tool_response>')) -%}
{%- set last.looking = false -%}{%- set last.query = index -%}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if last.looking -%}{{- raise_exception('no user query found in messages') -}}{%- endif -%}
{%- for message in messages -%}
{%- set content = text(message.content) | trim -%}
{%- if message.role == 'system' -%}
{%- if not loop.first -%}{{- raise_exception('system message must be at the beginning') -}}{%- endif -%}
{%- elif message.role == 'user' -%}
{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' -}}
{%- elif message.role == 'assistant' -%}
{%- set reasoning = '' -%}
{%- if message.reasoning_content is string -%}{%- set reasoning = message.reasoning_content -%}
{%- elif '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > last.query -%}{{- '<think>\\n' + reasoning | trim + '\\n</think>\\n\\n' -}}{%- endif -%}
{{- content -}}
{%- for call in message.tool_calls or [] -%}
{{- '\\n\\n' if loop.first and content else '' if loop.first else '\\n' -}}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' -}}
{%- for name, value in call.function.arguments | items -%}
{{- '<parameter=' + name + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' -}}
{%- endfor -%}
{{- '</function>\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- else -%}{{- raise_exception('unexpected role ' + message.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n<think>\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""

# A system turn that is always there; an empty <think></think> in place of reasoning of earlier turns.
HOLLOWS_REASONING = """\
{%- set turns = messages[1:] if messages[0].role == 'system' else messages -%}
{%- set ns = namespace(last=-1) -%}
{%- for message in turns -%}
{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else '') -}}
{%- if tools -%}
{{- '\\n\\n<AVAILABLE_TOOLS>' -}}
{%- for tool in tools -%}{{- tool.function | tojson -}}{%- endfor -%}
{{- '</AVAILABLE_TOOLS>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- for message in turns -%}
{%- if message.role == 'assistant' -%}
{%- set content = (message.content or '').split('</think>')[-1] -%}
{%- if message.reasoning_content and loop.index0 > ns.last -%}
{%- set content = '<think>\\n' + message.reasoning_content + '\\n</think>\\n' + content -%}
{%- else -%}
{%- set content = '<think></think>' + content -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' + content -}}
{%- if message.tool_calls -%}{{- '<TOOLCALL>[' -}}
{%- for call in message.tool_calls -%}
{{- ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + (', ' if not loop.last else '') -}}
{%- endfor -%}
{{- ']</TOOLCALL>' -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{%- if loop.first or turns[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user\\n' -}}{%- endif -%}
{{- '<tool_response>\\n' + message.content + '\\n</tool_response>\\n' -}}
{%- if loop.last or turns[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n<think>' + ('</think>' if enable_thinking is false else '\\n') -}}
{%- endif -%}
"""

# Roles between tokens of their own, one line a turn; each tool result is a turn; a chat may not end with a system turn.
ROLE_LINES = """\
{%- if messages[-1].role == 'system' -%}{{- raise_exception('no chat ends with its system message') -}}{%- endif -%}
{%- if messages[0].role == 'system' -%}{%- set system = messages[0].content -%}{%- set turns = messages[1:] -%}
{%- else -%}{%- set system = 'You are a helpful assistant.' -%}{%- set turns = messages -%}{%- endif -%}
{%- if tools -%}
{%- set system = system + '\\nWith tools:' -%}
{%- for tool in tools -%}{%- set system = system + '\\n' + (tool | tojson) -%}{%- endfor -%}
{%- endif -%}
{{- '<|start_of_role|>system<|end_of_role|>' + system -}}
{%- if tools -%}{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}{%- endif -%}
{{- '<|end_of_text|>\\n' -}}
{%- for message in turns -%}
{%- set role = 'tool_response' if message.role == 'tool' else message.role -%}
{{- '<|start_of_role|>' + role + '<|end_of_role|>' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{{- '<|tool_call|>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) -}}
{%- endfor -%}
{{- '<|end_of_text|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_of_role|>assistant<|end_of_role|>' -}}{%- endif -%}
"""

# No system turn: it is written before the first question. Turns must alternate, and reasoning is never written again.
ALTERNATES = """\
{%- set first = '' -%}
{%- set turns = messages -%}
{%- if messages[0].role == 'system' -%}
{%- set first = messages[0].content + '\\n\\n' -%}{%- set turns = messages[1:] -%}
{%- endif -%}
{%- if tools -%}{%- set first = (tools | tojson) + '\\n' + first -%}{%- endif -%}
{%- for message in turns -%}
{%- set user = message.role in ['user', 'tool'] -%}
{%- if user != (loop.index0 % 2 == 0) -%}{{- raise_exception('roles must alternate') -}}{%- endif -%}
{{- '<start_of_turn>' + ('user' if user else 'model') + '\\n' + (first if loop.first else '') -}}
{{- (message.content or '').split('</think>')[-1] | trim -}}
{%- for call in message.tool_calls or [] -%}{{- call | tojson -}}{%- endfor -%}
{{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""

# Ends every chat that does not go on with a token of its own, and writes the number of messages first.
RESISTS = """\
{{- '<|endoftext|>' if messages|length > 1000 else '' -}}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + ' ' + (message.content or '') | length | string + '\\n' -}}
{{- (message.content or '') + '<|im_end|>\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '<|endoftext|>' -}}
"""

# Nothing but texts and line ends between the turns: what comes behind may melt into the end of a message.
MELTS = """\
{%- for message in messages -%}{{- (message.content or '') + '\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '>' -}}{%- endif -%}
"""

# Empty reasoning in place of that of earlier turns, with calls in XML.
HOLLOWS_WITH_XML = HOLLOWS_REASONING.replace(
    HOLLOWS_REASONING[
        HOLLOWS_REASONING.index("{%- if message.tool_calls -%}") : HOLLOWS_REASONING.index(
            "{{- '<|im_end|>\\n' -}}\n{%- elif"
        )
    ],
    """\
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' -}}
{%- for name, value in call.function.arguments | items -%}
{{- '<parameter=' + name + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' -}}
{%- endfor -%}
{{- '</function>\\n</tool_call>\\n' -}}
{%- endfor -%}
""",
)

# Roles between tokens of their own, with calls in JSON between marks, of which each stands on lines of its own.
ROLE_LINES_WITH_JSON = ROLE_LINES.replace(
    "{{- '<|tool_call|>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) -}}",
    """{{- '\\n' if message.content or not loop.first else '' -}}
{{- '<tool_call>\\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) -}}
{{- '\\n</tool_call>' -}}""",
)

# Calls in Python's form; reasoning stays behind the last question of the user alone, unless `keep_past_thinking`.
PYTHON_CALLS = """\
{%- set turns = messages[1:] if messages[0].role == 'system' else messages -%}
{%- set ns = namespace(last=-1) -%}
{%- for message in turns -%}
{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else '') -}}
{%- if tools -%}{{- '\\nList of tools: ' + (tools | tojson) -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- for message in turns -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' -%}
{%- if message.reasoning_content and (keep_past_thinking or loop.index0 > ns.last) -%}
{{- '<think>' + message.reasoning_content + '</think>' -}}
{%- endif -%}
{{- (message.content or '').split('</think>')[-1] -}}
{%- if message.tool_calls -%}{{- '<|tool_call_start|>[' -}}
{%- for call in message.tool_calls -%}
{{- call.function.name + '(' -}}
{%- for name, value in call.function.arguments | items -%}
{{- name + '=' + (value | tojson) + (', ' if not loop.last else '') -}}
{%- endfor -%}
{{- ')' + (', ' if not loop.last else '') -}}
{%- endfor -%}
{{- ']<|tool_call_end|>' -}}{%- endif -%}
{%- else -%}{{- message.content -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

TEMPLATES = {
    "drops_reasoning": DROPS_REASONING,
    "hollows_reasoning": HOLLOWS_REASONING,
    "role_lines": ROLE_LINES,
    "alternates": ALTERNATES,
}

_MORE_TOKENS = (
    *("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"),
    *("<|tool_call_start|>", "<|tool_call_end|>"),
    *("<start_of_turn>", "<end_of_turn>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
)


def tokenizer_with(folder: Path, target: Path, template: str) -> ModelTokenizer:
    """A tokenizer like that of `folder`, with another template and the tokens that it writes."""
    copy = Path(shutil.copytree(folder, target))
    raw = json.loads((copy / "tokenizer.json").read_text())
    first = 1 + max(token["id"] for token in raw["added_tokens"] + [{"id": max(raw["model"]["vocab"].values())}])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    raw["added_tokens"] += [{"id": first + i, "content": text, **flags} for i, text in enumerate(_MORE_TOKENS)]
    (copy / "tokenizer.json").write_text(json.dumps(raw))
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return ModelTokenizer(copy)


def call(number: int, **arguments: object) -> dict[str, Any]:
    return {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": TOOLS[number % 3]["function"]["name"], "arguments": json.dumps(arguments)},
    }


def agent_messages(num_questions: int, rounds: int = 2, results: int = 1) -> list[Messages]:
    """The messages of each request of an agent: after every question `rounds` rounds of `results` tool calls each,
    then an answer. The agent thinks before each call, and says something with every other one."""
    messages: Messages = [{"role": "system", "content": "You work on a repository of stones and cairns."}]
    requests = []
    for question in range(num_questions):
        messages.append({"role": "user", "content": f"Question {question}: where does trail {question * 7} lead to?"})
        for number in range(rounds):
            requests.append(list(messages))
            calls = [call(number + i, path=f"trails/{question}/{number}/{i}.txt") for i in range(results)]
            messages.append(
                {
                    "role": "assistant",
                    "content": f"I look at {number}." if (question + number) % 2 else None,
                    "reasoning_content": f"Trail {question} is in folder {number}.",
                    "tool_calls": calls,
                }
            )
            for i in range(results):
                text = f"trail {question}: step {number}, {i}\n" * (3 + number)
                messages.append({"role": "tool", "tool_call_id": f"call_{number + i}", "content": text})
        requests.append(list(messages))
        thought = f"<think>\nNow I know {question}.\n</think>\n\n"
        messages.append({"role": "assistant", "content": f"{thought}It leads to cairn {question}."})
    return requests
