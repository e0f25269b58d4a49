"""Running states in smaller dtypes, in a core with a real tiny model: how far logits are off, that hits, preemption and
drafts go on as they do with float32 ones, and what is refused."""

import json
import shutil

import numpy as np
import pytest
import torch
from test_checkpoint_dtypes import distance, logits_of
from turned_engine import Engine, answer

from cairn.cache.audit import audit
from cairn.engine.contract import EngineConfig
from cairn.engine.devices import layout_of
from cairn.errors import ConfigError
from cairn.models.registry import open_model
from cairn.scheduler.preempt import preempt
from cairn.scheduler.speculation import SpeculativeConfig
from models.covered import STATES
from tiers import first, more

TEXT = np.random.default_rng(5).integers(20, 4000, 200).tolist()

NEAR = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 3e-2}
"""Of logits, how far off they may be, over their distance from their mean."""

NO_DRAFTS = SpeculativeConfig(method="none")


def engine_of(folder, dtype, **config) -> Engine:
    return Engine(folder, **{"exact": False, "mamba_ssm_cache_dtype": dtype, "speculative": NO_DRAFTS} | config)


@pytest.fixture(params=first(1, STATES.families))
def folder(request, made_model):
    return made_model(request.param)


def test_logits_are_near_those_of_float32_states(folder):
    """Of a prompt computed whole and of one that is restored; and bytes of slots and checkpoints are what is saved."""
    alone = engine_of(folder, "float32", enable_prefix_caching=False)
    alone.ask(TEXT[:170], seed=9, max_tokens=3)
    wanted, errors, sizes, slots = logits_of(alone, 9), {}, {}, {}
    for dtype, most in NEAR.items():
        engine = engine_of(folder, dtype)
        engine.ask(TEXT[:170], seed=8, max_tokens=3)
        errors[dtype] = distance(logits_of(engine, 8)[170], wanted[170])
        assert errors[dtype] <= most, dtype
        engine.ask(TEXT[:150])
        outputs = engine.ask([*TEXT[:150], *TEXT[:20]], seed=9, max_tokens=1)
        assert outputs[-1].cache.cached_tokens == 150
        whole = engine_of(folder, dtype, enable_prefix_caching=False)
        whole.ask([*TEXT[:150], *TEXT[:20]], seed=9, max_tokens=1)
        assert distance(logits_of(engine, 9)[170], logits_of(whole, 9)[170]) <= most, dtype
        info = engine.core.info.cache
        assert info.state_dtype == info.checkpoint_dtype == dtype
        sizes[dtype] = info.checkpoint_bytes
        recurrent = open_model(folder).with_states_in(dtype).config.cache_spec().recurrent
        slots[dtype] = recurrent.state_dtype
    # What is smaller costs something: nobody has kept float32.
    assert errors["float32"] < errors["float16"] < errors["bfloat16"]
    assert sizes["float32"] > sizes["float16"] == sizes["bfloat16"]
    assert slots == {dtype: dtype for dtype in NEAR}


@pytest.mark.parametrize(("dtype", "steps"), [("float16", 4), more("bfloat16", 4), more("float16", 1)])
def test_a_preempted_request_goes_on_from_its_checkpoint(tiny_model, dtype, steps):
    wanted = engine_of(tiny_model, dtype, enable_prefix_caching=False)
    wanted.ask(TEXT[:120], max_tokens=10, temperature=0.0)
    engine = engine_of(tiny_model, dtype)
    engine.submit("only", TEXT[:120], max_tokens=10, temperature=0.0)
    for _ in range(steps):
        engine.step()
    victim = engine.state.requests["only"]
    preempt(engine.state, victim, victim, 10_000)
    engine.run()
    assert engine.outputs["only"][-1].timings.num_preemptions == 1
    tokens, expected = answer(engine.outputs["only"]), answer(wanted.outputs["only"])
    same = [one == other for one, other in zip(tokens, expected, strict=True)]
    known = same.index(False) if False in same else len(same)
    assert known > steps
    before, after = logits_of(wanted, 1), logits_of(engine, 1)
    for position in range(120, 120 + known):
        assert distance(after[position], before[position]) < NEAR[dtype]
    audit(engine.state.cache)


@pytest.mark.parametrize(("family", "dtype"), [("qwen3_5", "float16"), more("nemotron_h", "bfloat16")])
def test_drafts_change_no_answer(made_model, family, dtype):
    """What is asked for twice is drafted from the first answer: verified with the live state as it is, then folded."""
    folder = made_model(family)
    answers, drafted = [], []
    for speculative in (NO_DRAFTS, SpeculativeConfig(method="suffix")):
        engine = engine_of(folder, dtype, speculative=speculative, enable_prefix_caching=False)
        for _ in range(2):
            engine.ask(TEXT[:70], max_tokens=24, temperature=0.0)
        answers.append(answer(engine.outputs["only"]))
        drafted.append(engine.core.stats().spec_decode.num_accepted_tokens)
    assert answers[0] == answers[1]
    assert drafted[0] == 0 < drafted[1]


def test_auto_is_what_the_checkpoint_names(made_model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(made_model("nemotron_h"), folder)
    raw = json.loads((folder / "config.json").read_text())
    for named, served in (("float16", "float16"), ("bfloat16", "bfloat16"), (None, "float32"), ("auto", "float32")):
        (folder / "config.json").write_text(json.dumps(raw | {"mamba_ssm_cache_dtype": named}))
        engine = engine_of(folder, "auto")
        assert {layer.state.dtype for layer in states_of(engine)} == {getattr(torch, served)}
        assert engine.core.info.cache.state_dtype == served
        assert Engine(folder).core.info.cache.state_dtype == "float32", "with --exact"
    (folder / "config.json").write_text(json.dumps(raw | {"mamba_ssm_cache_dtype": "float16"}))
    assert engine_of(folder, "float32").core.info.cache.state_dtype == "float32"


def states_of(engine):
    return engine.core._runner._live.recurrent


def test_what_cannot_be_is_refused_before_anything_is_loaded(tiny_model):
    for dtype in ("float16", "bfloat16"):
        with pytest.raises(ConfigError, match=f"--mamba-ssm-cache-dtype {dtype}: not with --exact.*leave one of them"):
            Engine(tiny_model, mamba_ssm_cache_dtype=dtype)
    for asked in ("int8", "float32"):
        with pytest.raises(ConfigError, match=f"--checkpoint-dtype {asked}: recurrent states are float16 here"):
            engine_of(tiny_model, "float16", checkpoint_dtype=asked)
    engine = engine_of(tiny_model, "float16", checkpoint_dtype="float16")
    assert engine.core.info.cache.checkpoint_dtype == "float16"


@pytest.mark.parametrize("family", ["lfm2", more("qwen3")])
def test_without_a_recurrent_state_it_means_nothing(made_model, family):
    folder = made_model(family)
    found = {
        layout_of(
            EngineConfig(model=str(folder), mamba_ssm_cache_dtype=dtype), open_model(folder).with_states_in(dtype)
        )
        for dtype in ("auto", "float32", "bfloat16", "float16")
    }
    assert len(found) == 1
    engine = engine_of(folder, "float16", checkpoint_dtype="int8")
    engine.ask(TEXT[:70])
    assert engine.ask(TEXT[:80])[-1].cache.cached_tokens == 70
