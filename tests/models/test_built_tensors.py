"""What config.json says without torch against the tensors that a model is built of."""

import math
import re
import subprocess
import sys
from typing import Any

import pytest

from cairn.models.families import family_of
from cairn.models.layer_sizes import ForwardSizes
from models.published_families import PUBLISHED
from replay.test_layouts import CONFIGS
from runner.harness import tensors

VOCABULARY = re.compile(r"(?:.+\.)?(?:embed_tokens|embed_tokens_per_layer|embeddings|lm_head)\.weight")
OF_ONE_EXPERT = re.compile(r".+\.experts\.(\d+)\..+")


def multiplied(name: str, shape: tuple[int, ...], experts_per_token: int) -> int:
    """How many elements of the tensor a token is multiplied with."""
    expert = OF_ONE_EXPERT.fullmatch(name)
    if VOCABULARY.fullmatch(name) or (expert is not None and int(expert[1]) >= experts_per_token):
        return 0
    if name.endswith("_bias"):
        return 0
    # a depthwise convolution's kernel is [channels, 1, taps]
    if len(shape) == 3 and shape[1] > 1:
        return experts_per_token * shape[1] * shape[2]
    return math.prod(shape) if len(shape) == 2 else 0


@pytest.mark.parametrize("raw", [*CONFIGS.values(), *(raw for raw, *_ in PUBLISHED.values())])
def test_a_token_meets_what_the_model_is_built_of(raw: dict[str, Any]) -> None:
    config = family_of(raw).parse(raw)
    built = tensors(config)
    chosen = getattr(config, "num_experts_per_tok", getattr(config, "top_k_experts", 0))
    active = sum(multiplied(name, shape, chosen) for name, shape in built.items())
    scores = sum(shape[1] for name, shape in built.items() if re.search(r"self_attn\.(o|out)_proj\.weight", name))
    # Nemotron-H calls every mixer a mixer: those with queries have a q_proj.
    scores += sum(shape[0] for name, shape in built.items() if name.endswith("mixer.q_proj.weight"))
    sizes = config.forward_sizes()
    # Those within a reach are counted apart.
    within = sum(limited.score_numbers for limited in sizes.limited_scores)
    assert sizes == ForwardSizes(active, scores - within, sizes.limited_scores)


def test_sizes_are_known_without_torch(tmp_path: Any) -> None:
    code = (
        "import sys; from cairn.replay.layouts import LAYOUT_NAMES, layout_for, sizes_for;"
        "[(layout_for(name), sizes_for(name)) for name in LAYOUT_NAMES];"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_model_is_built_without_torchs_compiler(tiny_model):
    """It takes a second and a half to import, and 70 MB; torch's arithmetic on the meta device brings it along."""
    code = (
        "import sys; from pathlib import Path; from cairn.models.registry import open_model;"
        f"open_model(Path({str(tiny_model)!r})).build(exact=False); sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False, timeout=120).returncode == 0
