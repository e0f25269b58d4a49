"""A checkpoint that speaks by heart: every layer's output is zero, so that the next token follows from the last one
alone, and lm_head holds which. A chat is answered with a thought and a sentence, and ends; what a form or a sampler
leaves open tends to closing quotes and brackets. vLLM's tests then see answers that end, as those of its own models do.

Chats of `SCRIPTS` have another answer: the chat template, which sees the whole conversation, puts a token of its own at
the prompt's end, and from there on the answer is spelled in tokens of its own. What a test asks for therefore comes
only where messages, tools and their results have reached the template, and comes as a call only where a call is read.

    python scripted_model.py MADE_MODEL FOLDER      (MADE_MODEL: from `cairn make-model`)
"""

import itertools
import json
import random
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
SURE_BY_HEART, SELDOM = 40.0, -16.0
VOCABULARY = 8192
GENERATION = "generation_config.json"
SAID = (
    """{%- set said = messages[-1].content | string -%}{%- set all = messages | map(attribute='content') | join -%}"""
)


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


STORY = " ".join(f"On day {day} the cat went to house {day} and slept." for day in range(1, 60))
# A condition of the chat template, over `said` (the last message), `all` (every message) and `tools`; and the answer.
SCRIPTS = (
    ("messages[-1].role == 'tool' and 'degrees' in said", "It is 98 degrees in Dallas."),
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
        call("get_weather", location="Berlin") + "\n" + call("get_time", location="Berlin"),
    ),
    ("tools and 'Berlin' in said and 'get_weather' in (tools | tojson)", call("get_weather", location="Berlin")),
    ("tools and 'Berlin' in said", call("get_current_weather", city="Berlin", country="Germany", unit="celsius")),
    ("tools and 'New York' in said", call("get_current_weather", location="New York")),
    ("'13 * 24' in said and 'QED' in all", "13 * 24 is 312. QED"),
    ("'13 * 24' in said", "13 times 24 makes 312."),
    ("'Multiply the result by 2' in said and '15. QED.' in all", "Twice 15 are 30. QED"),
    ("'my real name again' in said and 'real name is Mark' in all", "Your name is Mark."),
    ("'my name again' in said and 'name is John' in all and 'Mark' not in all", "You are called John."),
    ("'long story' in said", STORY),
    ("'1+1' in said and 'JSON' in said", '{"result": 2}'),
    ("'1+1' in said", "The answer is 2."),
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


def byte_letters() -> dict[int, str]:
    """How tokenizers of this kind write each byte (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def spell_scripts(target: Path) -> tuple[list[list[int]], int]:
    """Give the tokenizer tokens for the scripts, which no text is encoded to, the template its conditions, and each
    script a token that ends it. Returns the tokens of each script, its first one and its end included, and the size of
    the vocabulary."""
    letters, rng = byte_letters(), random.Random(0)
    tokenizer, config, generation = (
        json.loads((target / name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json", GENERATION)
    )
    vocab = tokenizer["model"]["vocab"]
    next_token = itertools.count(len(vocab))
    scripts, special, template = [], dict[str, int](), SAID
    for number, (condition, answer) in enumerate(SCRIPTS):
        begin, end = f"<|script_{number}|>", f"<|end_{number}|>"
        special[begin] = next(next_token)
        template += f"{{%- {'if' if number == 0 else 'elif'} {condition} -%}}{{{{- '{begin}' -}}}}"
        pieces = next(found for _ in range(1000) if (found := cut(answer, vocab, letters, rng)))
        for piece in pieces:
            vocab[piece] = next(next_token)
        special[end] = next(next_token)
        scripts.append([special[begin], *(vocab[piece] for piece in pieces), special[end]])
    vocab |= special
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] += [{"id": id, "content": name, "special": True} | flags for name, id in special.items()]
    config["added_tokens_decoder"] |= {str(id): {"content": name, "special": True} for name, id in special.items()}
    config["chat_template"] += f"{{%- if add_generation_prompt -%}}{template}{{%- endif -%}}{{%- endif -%}}"
    ends = generation["eos_token_id"]
    generation["eos_token_id"] = [*(ends if isinstance(ends, list) else [ends]), *(script[-1] for script in scripts)]
    for name, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", config), (GENERATION, generation)):
        (target / name).write_text(json.dumps(content, ensure_ascii=False))
    return scripts, next(next_token)


def cut(text: str, vocab: dict[str, int], letters: dict[int, str], rng: random.Random) -> list[str] | None:
    """Pieces that the vocabulary does not have, each once, as it writes them; None where this draw leaves a rest."""
    pieces, rest = list[str](), text
    while rest:
        heads = ["".join(letters[byte] for byte in rest[:size].encode()) for size in range(1, min(len(rest), 16) + 1)]
        sizes = [size for size, head in enumerate(heads, 1) if head not in vocab and head not in pieces]
        if not sizes:
            return None
        size = rng.choice(sizes)
        pieces.append(heads[size - 1])
        rest = rest[size:]
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
    for last, following in itertools.pairwise(path):
        head[following] = SURE * hidden[last] / hidden[last].pow(2).sum()
    for script in scripts:
        for last, following in itertools.pairwise(script):
            head[following, 1:] = SURE_BY_HEART * hidden[last, 1:] / hidden[last, 1:].pow(2).sum()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
