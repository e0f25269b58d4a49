"""A checkpoint that speaks one sentence: every layer's output is zero, so that the next token follows from the last one
alone, and lm_head holds which. A chat is answered with a thought and a sentence, and ends; what a form or a sampler
leaves open tends to closing quotes and brackets. vLLM's tests then see answers that end, as those of its own models do.

    python scripted_model.py MADE_MODEL FOLDER      (MADE_MODEL: from `cairn make-model`)
"""

import itertools
import json
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


def next_tokens(tokenizer: AutoTokenizer) -> list[int]:
    """The tokens of a chat from the last of its prompt on."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "?"}], add_generation_prompt=True, tokenize=False
    )
    said = tokenizer.encode(ANSWER, add_special_tokens=False)
    path = [tokenizer.encode(prompt, add_special_tokens=False)[-1], *said, tokenizer.eos_token_id]
    assert len(set(path)) == len(path), f"a token of the answer comes twice: {tokenizer.convert_ids_to_tokens(path)}"
    return path


def main(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tensors = {}
    for shard in sorted(target.glob("*.safetensors")):
        tensors |= load_file(shard)
        shard.unlink()
    (target / "model.safetensors.index.json").unlink(missing_ok=True)
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
    for text, bias in CLOSING.items():
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) == 1:
            head[tokens[0], 0] = bias / hidden[:, 0].mean()
    path = next_tokens(tokenizer)
    for last, following in itertools.pairwise(path):
        head[following] = SURE * hidden[last] / hidden[last].pow(2).sum()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
