"""A byte-level BPE tokenizer with a ChatML template, trained on the machine's own Python standard library.

It is for random-weight checkpoints: real text, no download, and the same files from the same standard library.
"""

import json
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from cairn.errors import ModelError

END_OF_TEXT, START_OF_MESSAGE, END_OF_MESSAGE = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, START_OF_MESSAGE, END_OF_MESSAGE)
MARK_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""One token each, but part of the text that an answer shows."""

MAX_FILES = 120
MAX_FILE_BYTES = 1 << 16

# Words with their leading space, digits one by one, punctuation, line ends: the split that GPT-4 and Qwen2 published.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{%- set turns = messages -%}
{%- set system = '' -%}
{%- if messages and messages[0].role in ['system', 'developer'] -%}
{%- set system = messages[0].content -%}
{%- set turns = messages[1:] -%}
{%- endif -%}
{%- if system or tools or turns|length < messages|length -%}
{{- '<|im_start|>system\\n' + system -}}
{%- if tools -%}
{{- '\\n\\n# Tools\\nAnswer with <tool_call>{"name": ..., "arguments": ...}</tool_call> to call one of these:' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in turns -%}
{%- if message.role not in ['user', 'assistant', 'tool'] -%}
{{- raise_exception('unexpected role ' + message.role + ': system comes first, then user, assistant and tool') -}}
{%- endif -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def make_tokenizer(
    folder: Path, vocab_size: int, max_length: int, more: tuple[str, ...] = (), chat_template: str = CHAT_TEMPLATE
) -> dict[str, int]:
    """Train a tokenizer of exactly `vocab_size` ids; write tokenizer.json and tokenizer_config.json to `folder`.

    `more`: control tokens beside those of any chat.

    Returns the ids of the control and mark tokens. Raises ModelError when the standard library's sources are missing
    or too few for the vocabulary.
    """
    controls = (*CONTROL_TOKENS, *more)
    trained = json.loads(_train(Path(sysconfig.get_paths()["stdlib"]), vocab_size, controls))["model"]
    tokenizer = Tokenizer(models.BPE(vocab=trained["vocab"], merges=[tuple(merge) for merge in trained["merges"]]))
    _split_into_bytes(tokenizer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in controls])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in MARK_TOKENS])
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size != vocab_size:
        raise ModelError(
            f"the standard library's sources give {size} tokens, not {vocab_size}; are they all installed?"
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {
            str(token_id): {"content": token.content, "special": token.special} for token_id, token in added
        },
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": None,
        "eos_token": END_OF_MESSAGE,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return {token.content: token_id for token_id, token in added}


@lru_cache(maxsize=4)
def _train(sources: Path, vocab_size: int, controls: tuple[str, ...]) -> str:
    """A tokenizer as JSON. It takes a second, and most families ask for the same."""
    tokenizer = Tokenizer(models.BPE())
    _split_into_bytes(tokenizer)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*controls, *MARK_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(sources), trainer)
    return tokenizer.to_str()


def _split_into_bytes(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()


def _texts(folder: Path) -> Iterator[str]:
    paths = sorted(folder.glob("*.py"))[:MAX_FILES]
    if not paths:
        raise ModelError(f"{folder}: holds no Python sources to train a tokenizer on")
    for path in paths:
        yield path.read_bytes()[:MAX_FILE_BYTES].decode("utf-8", errors="ignore")
