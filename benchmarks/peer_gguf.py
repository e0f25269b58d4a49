"""A checkpoint as a GGUF file, by llama.cpp's own converter and quantizer; see `peer_llama` for where they are.

    python -m benchmarks.peer_gguf SOURCE MODEL OUT

The converter knows tokenizers by a hash, and models with random weights have one of their own: it is called Qwen3.5's,
which decides how text is split, and no text is sent. The converter runs in a process of its own, with the torch and the
transformers of cairn's environment.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.peer_llama import programs_of, source_of
from benchmarks.peer_setup import run

__all__ = ["FORMS", "gguf_of"]

FORMS: Mapping[str, str] = MappingProxyType({"": "bf16", "int8": "q8_0", "int4": "q4_0"})
"""By cairn's --quantization. Q8_0 takes 8.5 bits a weight, cairn's int8 8; Q4_0 takes 4.5, as cairn's int4 does."""

PRE_TOKENIZER = "qwen35"
ROOT = Path(__file__).parents[1]


def gguf_of(model: Path, quantization: str, llama: Path, isa: str) -> Path:
    """The GGUF file beside the folder `model`, made where it is missing or older. `llama`: folder of `peer_llama`.

    Embeddings stay in bfloat16 and all that cairn quantizes is quantized, the output with it. Raises PeerError.
    """
    plain = _file(model, "")
    if _is_older(plain, model / "config.json"):
        print(f"writing {plain}", flush=True)
        part = plain.with_suffix(".part")
        command = [sys.executable, "-m", "benchmarks.peer_gguf", source_of(llama), model.absolute(), part.absolute()]
        run([*command], f"{model} cannot be written as GGUF", cwd=ROOT)
        part.rename(plain)
    wanted = _file(model, quantization)
    if _is_older(wanted, plain):
        print(f"writing {wanted}", flush=True)
        part = wanted.with_suffix(".part")
        quantize: list[str | Path] = [programs_of(llama, isa) / "llama-quantize", "--pure", "--token-embedding-type"]
        run([*quantize, "bf16", plain, part, FORMS[quantization]], f"{plain} cannot be quantized; `make bench-llama`")
        part.rename(wanted)
    return wanted


def _file(model: Path, quantization: str) -> Path:
    return model.parent / f"{model.name}-{FORMS[quantization]}.gguf"


def _is_older(made: Path, source: Path) -> bool:
    return not made.is_file() or made.stat().st_mtime < source.stat().st_mtime


def converter_flags(config: Mapping[str, Any]) -> list[str]:
    """Of llama.cpp's converter, which looks for a head that predicts further tokens unless it is told of none."""
    return [] if config.get("mtp_num_hidden_layers") else ["--no-mtp"]


def name_unknown_tokenizers(model_class: Any) -> None:
    """Have the converter's base class call those that it does not know by one name."""
    known = model_class.get_vocab_base_pre

    def name_of(self: Any, tokenizer: Any) -> str:
        try:
            return known(self, tokenizer)
        except NotImplementedError:
            return PRE_TOKENIZER

    model_class.get_vocab_base_pre = name_of


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("source", "model", "out"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args(words)
    sys.path.insert(0, str(arguments.source))
    import convert_hf_to_gguf
    from conversion.base import TextModel

    name_unknown_tokenizers(TextModel)
    flags = converter_flags(json.loads((arguments.model / "config.json").read_text()))
    sys.argv = [
        "convert_hf_to_gguf.py",
        str(arguments.model),
        "--outtype",
        "bf16",
        "--outfile",
        str(arguments.out),
        *flags,
    ]
    convert_hf_to_gguf.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
