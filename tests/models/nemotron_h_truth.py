"""transformers' Nemotron-H as the reference, in float64 from end to end."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import NemotronHConfig as PublishedConfig
from transformers import NemotronHForCausalLM
from transformers.models.nemotron_h import modeling_nemotron_h

from models.wide_float import wide_float


def published(raw: Mapping[str, Any], weights: Mapping[str, Tensor], clamp: bool) -> NemotronHForCausalLM:
    """transformers' model with these weights. `clamp` False switches its lower bound of prefill's time steps off."""
    # The other implementations of experts have no float64.
    model = NemotronHForCausalLM(PublishedConfig(**raw, experts_implementation="eager")).eval()
    state = {name.replace("backbone.", "model."): value for name, value in weights.items()}
    for name in [name for name in model.state_dict() if name.endswith(("experts.up_proj", "experts.down_proj"))]:
        prefix, projection = name.rsplit(".", 1)
        count = len([key for key in state if key.startswith(f"{prefix}.") and key.endswith(f".{projection}.weight")])
        state[name] = torch.stack([state.pop(f"{prefix}.{expert}.{projection}.weight") for expert in range(count)])
    model.load_state_dict(state, strict=True)
    for block in model.model.layers:
        if not clamp and block.block_type == "linear_attention":
            block.mixer.time_step_limit = (0.0, float("inf"))
    return model


def logits_of(model: NemotronHForCausalLM, tokens: list[int], wide: bool) -> Tensor:
    """Logits at every position by full recompute, [n, vocab]; `wide`: computed in float64 throughout."""
    with torch.inference_mode():
        if not wide:
            return model(torch.tensor([tokens]), use_cache=False).logits[0]
        model = model.double()
        with wide_float(modeling_nemotron_h):
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    assert logits.dtype == torch.float64
    return logits
