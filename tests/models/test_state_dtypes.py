"""What --mamba-ssm-cache-dtype comes to, and that what counts bytes by it agrees."""

import io
import json
import shutil
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from cairn.check.report import CheckSettings, check, render
from cairn.errors import ConfigError, ModelError
from cairn.kernels.state_encoding import STATE_DTYPES
from cairn.models.families import FAMILIES
from cairn.models.registry import open_model
from cairn.models.state_dtypes import choose_state_dtype
from cairn.replay.layouts import layout_for
from cairn.runner.memory import LiveStates
from models.published_qwen3_5 import QWEN35
from tiers import first


def test_what_is_asked_for_counts_before_what_is_named():
    for named in STATE_DTYPES:
        assert choose_state_dtype("auto", named) == named
        assert choose_state_dtype("auto", named, exact=True) == "float32"
        for asked in STATE_DTYPES:
            assert choose_state_dtype(asked, named) == asked
        assert choose_state_dtype("float32", named, exact=True) == "float32"


def test_what_is_none_is_refused():
    with pytest.raises(
        ConfigError, match="--mamba-ssm-cache-dtype must be one of auto, float32, bfloat16, float16, not"
    ):
        choose_state_dtype("fp8", "float32")
    for dtype in ("float16", "bfloat16"):
        with pytest.raises(ConfigError, match=f"--mamba-ssm-cache-dtype {dtype}: not with --exact"):
            choose_state_dtype(dtype, "float32", exact=True)


@pytest.mark.parametrize("family", first(2, ["nemotron_h", "qwen3_5", "granitemoehybrid", "falcon_h1", "olmo_hybrid"]))
@pytest.mark.parametrize("name", ["mamba_ssm_cache_dtype", "mamba_ssm_dtype"])
def test_config_json_names_it(made_model, tmp_path, family, name):
    folder = tmp_path / "model"
    shutil.copytree(made_model(family), folder)
    raw = json.loads((folder / "config.json").read_text())
    inner = {
        field: raw.get("text_config", raw).pop(field, None) for field in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
    }
    assert set(inner.values()) <= {None, "float32"}
    for named in (*STATE_DTYPES, "int8"):
        text = (
            raw | {"text_config": raw["text_config"] | {name: named}} if "text_config" in raw else raw | {name: named}
        )
        (folder / "config.json").write_text(json.dumps(text))
        if named in STATE_DTYPES:
            assert open_model(folder).config.state_dtype == named
        else:
            with pytest.raises(ModelError, match=f"{name} is 'int8', but only 'auto' or 'float32' or"):
                open_model(folder)


def test_published_configs():
    assert FAMILIES["qwen3_5_moe"].parse(QWEN35).state_dtype == "float32"


@pytest.mark.parametrize("family", first(2, ["nemotron_h", "qwen3_5", "lfm2", "qwen3"]))
def test_layouts_slots_and_reports_agree(made_model, family):
    folder = made_model(family)
    whole = None
    for dtype in STATE_DTYPES:
        opened = open_model(folder).with_states_in(dtype)
        layout = opened.layout(16, checkpoint_dtype="auto")
        report = check(folder, CheckSettings(mamba_ssm_cache_dtype=dtype))
        assert report.layout == layout == layout_for(str(folder), state_dtype=dtype)
        live = LiveStates(opened.config.cache_spec().memory_spec(opened.dtype, torch.device("cpu")), 3)
        states = live.tensors[2].nbytes if len(live.tensors) == 3 else 0
        whole = whole or (report.plan.slot, layout.state_bytes, states, opened)
        halves = 2 if dtype != "float32" and states else 1
        assert states == whole[2] // halves
        assert whole[0] - report.plan.slot == (whole[2] - states) // 4
        spec = opened.config.cache_spec().recurrent
        saved = 0 if not states else 2 * spec.num_layers * torch.Size(spec.state).numel() * (halves - 1)
        assert whole[1] - layout.state_bytes == saved
        assert (layout.state_dtype == dtype) == (dtype == "float32" or bool(states))
    # Two servers of unequal dtypes have unequal layouts, also where the bytes are as many.
    assert layout != replace(layout, state_dtype="bfloat16")


def test_the_report_says_it(made_model):
    def text(**settings):
        output = io.StringIO()
        Console(file=output, width=200).print(render(check(made_model("nemotron_h"), CheckSettings(**settings))))
        return output.getvalue()

    assert ", in float16" in text(mamba_ssm_cache_dtype="float16")
    assert "states in float16" in text(mamba_ssm_cache_dtype="float16")
    assert "in float16" not in text(mamba_ssm_cache_dtype="float32")
    with pytest.raises(ConfigError, match="--checkpoint-dtype int8: recurrent states are bfloat16 here"):
        text(mamba_ssm_cache_dtype="bfloat16", checkpoint_dtype="int8")
