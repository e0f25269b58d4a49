"""A checkpoint that speaks by heart: every layer's output is zero, so that the next token follows from the last one
alone, and lm_head holds which. A chat is answered with a thought and a sentence, and ends; what a form or a sampler
leaves open tends to closing quotes and brackets. vLLM's tests then see answers that end, as those of its own models do.

Chats of `SCRIPTS` have another answer: the chat template, which sees the whole conversation, puts a token of its own at
the prompt's end, and from there on the answer is spelled in tokens of its own. What a test asks for therefore comes
only where messages, tools and their results have reached the template, and comes as a call only where a call is read.

A script of several answers in a list gives each the same chance; in a tuple, the second one comes only where a grammar
forbids the first. Grammars write what has only one way to go on in tokens of their own, so no answer is cut there.

    python scripted_model.py MADE_MODEL FOLDER      (MADE_MODEL: from `cairn make-model`)
"""

import itertools
import json
import random
import re
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

ANSWER = "<think>We need no more than this</think>Hello! How can I help"
CLOSING = {'"': 6.0, "}": 5.5, "]": 5.5, ",": 5.0, '"}': 5.5, '",': 5.0}
SILENT = ("out_proj.weight", "o_proj.weight", "down_proj.weight")
SURE, SHARED = 20.0, 4.0
SURE_BY_HEART, OTHERWISE, SELDOM = 40.0, 30.0, -16.0
VOCABULARY = 8192
GENERATION = "generation_config.json"
SCRIPTED_TEMPLATE = "scripts.jinja"
"""What a chat template ends with: for those that a test brings along."""
ONE_TOKEN_EACH = ("Hello",)
LONGEST = 160
# Where an answer is not cut: a grammar has but one way to go on there.
WHOLE = re.compile(
    r'</?think>\n?|\n?<tool_call>\n{"name": "\w+", "arguments": {"\w+": ?|}}\n</tool_call>'
    r'|[,{] ?"\w+": ?|"(?:fahrenheit|celsius)"|true'
)
ANY_ROLE = re.compile(r"{%- if message.role not in .*?{%- endif -%}\n", re.DOTALL)
SAID = (
    """{%- set said = messages[-1].content | string -%}{%- set all = messages | map(attribute='content') | join -%}"""
)


def call(name: str, /, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


THOUGHT = (
    "<think>Let me see what was asked, and which of the tools can tell it. There is one whose name says so, and its "
    "arguments are all in the question; nothing else is needed before it can be called.</think>\n"
)


def employee(name: str, age: int) -> str:
    history = [{"company": "Acme", "position": "Engineer"}]
    return call("dummy_function_name", name=name, age=age, skills=["Go", "SQL", "Rust"], work_history=history)


STORY = " ".join(f"On day {day} the cat went to house {day} and slept." for day in range(1, 60))
MOBY_DICK = (
    "Call me Ishmael. Some years ago - never mind how long precisely - having little or no money in my purse, and"
    " nothing particular to interest me on shore, I thought I would sail about a little and see the watery part "
    "of the world. It is a way I have of driving off the spleen, and regulating the circulation. Whenever I find "
    "myself growing grim about the mouth; whenever it is a damp, drizzly November in my soul, I account it high "
    "time to get to sea as soon as I can."
)
SUM = (
    "The answer is 2: one and one more are two, as anyone can see who puts an apple beside another apple and then"
    " counts both of them, slowly and with care, from the left to the right or else from the right to the left."
)
SURELY = (
    "I would say",
    "of course",
    "as always",
    "most likely",
    "or so I think",
    "by all means",
    "no doubt",
    "or tiny",
)
# A condition of the chat template, over `said` (the last message), `all` (every message) and `tools`; and the answer.
SCRIPTS = (
    (
        "messages[-1].role == 'tool' and 'Orlando' in said and '78 degrees' in said and '98 degrees' in all",
        "It is 98 degrees in Dallas and 78 degrees in Orlando.",
    ),
    ("messages[-1].role == 'tool' and '98 degrees' in said", "It is 98 degrees in Dallas."),
    (
        "tools and 'Dallas' in said and 'Orlando' in said",
        call("get_current_weather", city="Dallas", state="TX", unit="fahrenheit")
        + "\n"
        + call("get_current_weather", city="Orlando", state="FL", unit="fahrenheit"),
    ),
    ("tools and 'Dallas' in said", call("get_current_weather", city="Dallas", state="TX", unit="fahrenheit")),
    ("tools and 'Paris' in said", call("get_weather", latitude=48.85, longitude=2.35, location="Paris")),
    (
        "tools and 'get_time' in (tools | tojson)",
        call("get_weather", location="Berlin") + "\n" + call("get_time", location="Tokyo"),
    ),
    ("tools and 'Berlin' in said and 'get_weather' in (tools | tojson)", call("get_weather", location="Berlin")),
    (
        "tools and 'Berlin' in said",
        THOUGHT + call("get_current_weather", city="Berlin", country="Germany", unit="fahrenheit"),
    ),
    ("tools and 'New York' in said", call("get_current_weather", location="New York")),
    ("tools and 'another one with a different name' in said", THOUGHT + employee("Grace", 45)),
    ("tools and 'employee profile' in said", THOUGHT + employee("Ada", 36)),
    ("'13 * 24' in said and 'QED' in all", "13 * 24 is 312. QED"),
    ("'13 * 24' in said", "<think>13 times 20 is 260, and 13 times 4 is 52.</think>\n13 times 24 makes 312."),
    ("'Multiply the result by 2' in said and '15. QED.' in all", "Twice 15 are 30. QED"),
    ("'my real name again' in said and 'real name is Mark' in all", "Your name is Mark."),
    ("'my name again' in said and 'name is John' in all and 'Mark' not in all", "You are called John."),
    ("'long story' in said", STORY),
    ("'first paragraph of Moby Dick' in said", MOBY_DICK),
    ("'opposite of big' in said", [f"Small, {word}." for word in SURELY]),
    ("'1+1' in said and 'without any other text' in said", "2"),
    ("'1+1' in said and 'JSON' in said", '{"result": 2}'),
    ("'1+1' in said and 'concise' not in said", (SUM, '{"result": 2}')),
    ("'4 or 12' in said and enable_thinking is defined and not enable_thinking", "12 is larger."),
    (
        "'john@example.com' in said",
        '{"name":"John Smith","email":"john@example.com","plan_interest":"Enterprise","demo_requested":true}',
    ),
    ("'science fair' in said", '{"event_name":"science fair","date":"Friday","participants":["Alice","Bob"]}'),
)


def next_tokens(tokenizer: AutoTokenizer) -> list[int]:
    """The tokens of a chat from the last of its prompt on."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "?"}], add_generation_prompt=True, tokenize=False
    )
    said = tokenizer.encode(ANSWER, add_special_tokens=False)
    path = [tokenizer.encode(prompt, add_special_tokens=False)[-1], *said, tokenizer.eos_token_id]
    assert len(set(path)) == len(path), f"a token of the answer comes twice: {tokenizer.convert_ids_to_tokens(path)}"
    return path


def call_ends(tokenizer: AutoTokenizer) -> set[int]:
    """The last token of a call, as a mark and as text."""
    return {tokenizer.encode(text, add_special_tokens=False)[-1] for text in ("</tool_call>", "tool_call>")}


def byte_letters() -> dict[int, str]:
    """How tokenizers of this kind write each byte (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def spell_scripts(target: Path) -> tuple[list[tuple[list[int], float]], int]:
    """Give the tokenizer tokens for the scripts, which no text is encoded to, the template its conditions, and each
    answer a token that ends it. Returns the tokens of each answer, those before it and its end included, with how sure
    its first one is, and the size of the vocabulary."""
    letters, rng = byte_letters(), random.Random(0)
    tokenizer, config, generation = (
        json.loads((target / name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json", GENERATION)
    )
    vocab = tokenizer["model"]["vocab"]
    next_token = itertools.count(len(vocab))
    merge_words(target, tokenizer["model"], next_token)
    paths, special, template = [], dict[str, int](), SAID
    for number, (condition, answers) in enumerate(SCRIPTS):
        begin = f"<|script_{number}|>"
        special[begin] = next(next_token)
        template += f"{{%- {'if' if number == 0 else 'elif'} {condition} -%}}{{{{- '{begin}' -}}}}"
        for place, answer in enumerate([answers] if isinstance(answers, str) else answers):
            end = f"<|end_{number}_{place}|>"
            if answer in vocab:
                path = [vocab[answer]]
            else:
                pieces = next(found for _ in range(1000) if (found := cut(answer, vocab, letters, rng)))
                for piece in pieces:
                    vocab[piece] = next(next_token)
                path = [vocab[piece] for piece in pieces]
            special[end] = next(next_token)
            sure = OTHERWISE if place and isinstance(answers, tuple) else SURE_BY_HEART
            paths.append(([special[begin], *path, special[end]], sure))
    vocab |= special
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] += [{"id": id, "content": name, "special": True} | flags for name, id in special.items()]
    config["added_tokens_decoder"] |= {str(id): {"content": name, "special": True} for name, id in special.items()}
    scripted = f"{template}{{%- endif -%}}"
    config["chat_template"], num_places = ANY_ROLE.subn("", config["chat_template"])
    assert num_places == 1, "the template has no place that refuses roles"
    config["chat_template"] += f"{{%- if add_generation_prompt -%}}{scripted}{{%- endif -%}}"
    (target / SCRIPTED_TEMPLATE).write_text(scripted)
    ends = generation["eos_token_id"]
    generation["eos_token_id"] = [*(ends if isinstance(ends, list) else [ends]), *(path[-1] for path, _ in paths)]
    for name, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", config), (GENERATION, generation)):
        (target / name).write_text(json.dumps(content, ensure_ascii=False))
    return paths, next(next_token)


def merge_words(target: Path, model: dict, next_token: "itertools.count[int]") -> None:
    """Make each of the words one token, as it is for the models that vLLM's tests count tokens of."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    for word in ONE_TOKEN_EACH:
        pieces = tokenizer.tokenize(word)
        while len(pieces) > 1:
            pair, pieces = pieces[:2], ["".join(pieces[:2]), *pieces[2:]]
            model["merges"].append(pair)
            if pieces[0] not in model["vocab"]:
                model["vocab"][pieces[0]] = next(next_token)


def cut(text: str, vocab: dict[str, int], letters: dict[int, str], rng: random.Random) -> list[str] | None:
    """Pieces that the vocabulary does not have, each once, as it writes them; None where this draw leaves a rest."""
    whole = {place for found in WHOLE.finditer(text) for place in range(found.start() + 1, found.end())}
    pieces, start = list[str](), 0
    while start < len(text):
        heads = {
            end: "".join(letters[byte] for byte in text[start:end].encode())
            for end in range(start + 1, min(start + LONGEST, len(text)) + 1)
            if end not in whole
        }
        ends = [end for end, head in heads.items() if head not in vocab and head not in pieces][:12]
        if not ends:
            return None
        end = rng.choice(ends)
        pieces.append(heads[end])
        start = end
    return pieces


def resize_vocabulary(target: Path, tensors: dict[str, torch.Tensor], size: int) -> None:
    """More rows for embedding and lm_head, all zero."""
    config = json.loads((target / "config.json").read_text())
    config.get("text_config", config)["vocab_size"] = size
    (target / "config.json").write_text(json.dumps(config))
    for name in [
        name for name in tensors if name.endswith(("embeddings.weight", "embed_tokens.weight", "lm_head.weight"))
    ]:
        if "visual" not in name:
            rows = tensors[name]
            tensors[name] = torch.cat([rows, rows.new_zeros(size - len(rows), rows.shape[1])])


def main(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tensors = {}
    for shard in sorted(target.glob("*.safetensors")):
        tensors |= load_file(shard)
        shard.unlink()
    (target / "model.safetensors.index.json").unlink(missing_ok=True)
    scripts, num_tokens = spell_scripts(target)
    assert num_tokens <= VOCABULARY, num_tokens
    num_known = len(tokenizer)
    resize_vocabulary(target, tensors, VOCABULARY)
    for name, tensor in tensors.items():
        if name.endswith(SILENT) and "visual" not in name:
            tensor.zero_()
    embedding = next(tensors[name] for name in tensors if name.endswith(("embeddings.weight", "embed_tokens.weight")))
    final = next(tensors[name] for name in tensors if name.endswith(("norm_f.weight", "language_model.norm.weight")))
    if json.loads((source / "config.json").read_text())["model_type"].startswith("qwen3_5"):
        final = final + 1
    noise = torch.Generator().manual_seed(0)
    embedding.normal_(generator=noise)
    embedding[:, 0] = SHARED  # what every token has in common: a weight on it is a bias
    hidden = embedding / embedding.pow(2).mean(-1, keepdim=True).sqrt() * final
    head = tensors["lm_head.weight"]
    head.normal_(generator=noise).div_(hidden.norm(dim=-1).mean())
    head[:, 0] = 0
    head[num_known:] = 0
    head[num_known:, 0] = SELDOM / hidden[:, 0].mean()
    for text, bias in CLOSING.items():
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) == 1:
            head[tokens[0], 0] = bias / hidden[:, 0].mean()
    path = next_tokens(tokenizer)
    # as a trained model knows its template: what comes after the first word of a prompt, and after a call's end
    pairs = [*itertools.pairwise(path), *itertools.pairwise(tokenizer.encode("<|im_start|>system\n")[-2:])]
    pairs += [(token, tokenizer.eos_token_id) for token in call_ends(tokenizer)]
    head[[following for _, following in pairs]] = 0
    for last, following in pairs:
        head[following] += SURE * hidden[last] / hidden[last].pow(2).sum()
    for script, sure in scripts:
        for number, (last, following) in enumerate(itertools.pairwise(script)):
            scale = SURE_BY_HEART if number else sure
            head[following, 1:] = scale * hidden[last, 1:] / hidden[last, 1:].pow(2).sum()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
