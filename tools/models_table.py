"""docs/models.md: which families are served in which formats on which devices, by what the tests cover.

    python tools/models_table.py [--check]

The page is made of `tests/models/covered.py`, which the tests take their parameters from. With --check nothing is
written: exit code 1 says that the page is not what it would be.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from cairn.models.families import FAMILIES, family_of  # noqa: E402
from cairn.models.random_weights.make_model import RECIPES  # noqa: E402
from cairn.models.random_weights.recipe import CheckpointOptions  # noqa: E402
from models.covered import FORMATS, WAYS, Coverage  # noqa: E402

OUT = ROOT / "docs" / "models.md"

ROWS = {
    "nemotron_h": ("Nemotron-H, Nemotron 3", ("nemotron_h",)),
    "qwen3_5": ("Qwen3.5", ("qwen3_5_text", "qwen3_5")),
    "qwen3_5_moe": ("Qwen3.5 MoE, Qwen3-Next", ("qwen3_5_moe_text", "qwen3_5_moe", "qwen3_next")),
    "granitemoehybrid": ("Granite 4.0", ("granitemoehybrid",)),
    "falcon_h1": ("Falcon-H1", ("falcon_h1",)),
    "olmo_hybrid": ("Olmo Hybrid", ("olmo_hybrid",)),
    "lfm2": ("LFM2", ("lfm2",)),
    "lfm2_moe": ("LFM2 MoE", ("lfm2_moe",)),
    "qwen3": ("Qwen3", ("qwen3",)),
    "qwen3_moe": ("Qwen3 MoE", ("qwen3_moe",)),
    "granite": ("Granite 3", ("granite",)),
    "llama4": ("Llama 4", ("llama4_text", "llama4")),
    "lfm3": ("LFM3", ("lfm3",)),
    "gemma4": ("Gemma 4", ("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified")),
    "gemma3": ("Gemma 3", ("gemma3_text", "gemma3")),
    "gemma2": ("Gemma 2", ("gemma2",)),
    "gpt_oss": ("gpt-oss", ("gpt_oss",)),
}
"""By the name in `cairn make-model`: how its models are called, and the `model_type` of their config.json."""

MADE_AS = {"qwen3_5_vl": "qwen3_5"}
"""Names of `cairn make-model` that are in another one's row."""

HEAD = """\
# Models

Which families are served, in which formats and on which devices. `tools/models_table.py` makes this page of the
lists that the tests take their parameters from (`tests/models/covered.py`), and a test fails where it is another
one: a mark is a family that these tests run with, `long run` where `make test-long` does and nothing that is run for
each change. No mark means that nobody has tested it, not that it is refused.
What is refused is refused by name when a checkpoint is opened: `cairn check MODEL` says it from config.json and the
headers of files alone, and what serving takes on this machine, or with `--gpu` on another one
([flags.md](flags.md)). A family is a file: [adding-a-family.md](adding-a-family.md).

"""

FAMILIES_TEXT = """\
A model without a recurrent state goes on from any token that it shares with an earlier request, others from a
checkpoint.
"""

FORMATS_TEXT = """\
What the CPU's kernels compute and what the GPU's do. Tests of the GPU run on one, and elsewhere by Triton's
interpreter ([gpu.md](gpu.md)). `int8` and `int4` are made of any checkpoint while it is loaded (`--quantization`);
the other formats are those of checkpoints as they are published ([quantized-checkpoints.md](quantized-checkpoints.md)).
"""

WAYS_TEXT = """\
The engine's features, each held to the answers of an engine without it: with `--exact` bit for bit. `head`: also
with drafts of the checkpoint's own head.
"""


def write_page() -> str:
    """The whole page."""
    return HEAD + "\n".join((*_families(), "", *_formats(), "", *_ways(), ""))


def _families() -> Iterator[str]:
    yield "## Families\n"
    yield FAMILIES_TEXT
    yield "| family | `model_type` | architecture | layers of the tiny model | drafts by a head |"
    yield "|---|---|---|---|---|"
    for name, (words, model_types) in ROWS.items():
        recipe = RECIPES[name]
        raw = recipe.config("tiny", CheckpointOptions("float32", 4096, 4096, 0, 1, dict.fromkeys(recipe.tokens, 2)))
        layers = ", ".join(f"{count} {kind}" for kind, count in family_of(raw).parse(raw).layer_counts().items())
        types, classes = (
            ", ".join(f"`{each}`" for each in dict.fromkeys(of))
            for of in (model_types, (FAMILIES[each].architecture for each in model_types))
        )
        yield f"| {words} | {types} | {classes} | {layers} | {'yes' if recipe.mtp_fields else ''} |"


def _formats() -> Iterator[str]:
    yield "## Formats and devices\n"
    yield FORMATS_TEXT
    yield from _table(FORMATS, lambda coverage: f"{coverage.device}: {coverage.title}")


def _ways() -> Iterator[str]:
    yield "## What gives the same answers\n"
    yield WAYS_TEXT
    yield from _table(WAYS, lambda coverage: coverage.title)


def _table(columns: Sequence[Coverage], title: Callable[[Coverage], str]) -> Iterator[str]:
    yield f"| family | {' | '.join(map(title, columns))} |"
    yield f"|---|{'---|' * len(columns)}"
    for name, (words, _) in ROWS.items():
        yield f"| {words} | {' | '.join(_mark(name, coverage) for coverage in columns)} |"
    yield "\nThe tests:\n"
    for each in columns:
        yield f"- {title(each)}: {', '.join(f'`tests/{file}`' for file in each.tests)}"


def _mark(name: str, coverage: Coverage) -> str:
    names = {name, *(made for made, row in MADE_AS.items() if row == name)}
    if not names & coverage.plain_families:
        return ""
    if not names & {each.removesuffix("+mtp") for each in coverage.regular_families}:
        return "long run"
    return "yes, head" if f"{name}+mtp" in coverage.families else "yes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail where the page is another one")
    page = write_page()
    if not parser.parse_args().check:
        OUT.write_text(page, encoding="utf-8")
    elif OUT.read_text(encoding="utf-8") != page:
        sys.exit("docs/models.md is not what the tests cover: python tools/models_table.py writes it")


if __name__ == "__main__":
    main()
