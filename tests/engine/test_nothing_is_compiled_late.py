"""Once a server has started, no request waits for the CPU's compiler."""

from itertools import cycle, product

import numpy as np
import pytest

from cairn.engine.build import build_core
from cairn.engine.contract import SpeculativeConfig
from cairn.kernels.cpu.compiled import Kernel
from cairn.kernels.cpu.warm_up import KERNELS
from doubles.engine_requests import generate_request
from engine.test_recorded_decodes import FORMS, SOME_FORMS, config_of
from models.covered import RECORDED
from tiers import by_run, long, more

FIRST = [("qwen3_5+mtp", "bfloat16"), ("nemotron_h", "float32"), ("qwen3_5_moe", "int8")]
DTYPES = [("float32", "float32"), ("float16", "float32"), ("int8", "float32"), ("auto", "float16")]
"""Of checkpoints and states."""

CASES = [case + dtypes for case, dtypes in product(FIRST, DTYPES)]
IN_TURN = [case + dtypes for case, dtypes in zip(cycle(FIRST), DTYPES, strict=False)]

WITH_HEADS = ("qwen3_5+mtp", "nemotron_h+mtp", "qwen3_5_moe+mtp")
RARE = {case for case in SOME_FORMS | {*product(WITH_HEADS, FORMS[:3])} if case not in FIRST}


@pytest.mark.parametrize(
    ("family", "form", "checkpoint_dtype", "state_dtype"),
    # what states are in is of no matter to other kernels: each of these once
    [
        *by_run(IN_TURN, CASES, CASES),
        *(more(*case, "auto", "bfloat16") for case in FIRST),
        *(
            (more if case in RARE else long)(*case, "float16", "float32")
            for case in product((*RECORDED.families, *WITH_HEADS), FORMS)
            if case not in FIRST
        ),
    ],
)
def test_requests_wait_for_no_compiler(family, form, checkpoint_dtype, state_dtype, made_model, monkeypatch):
    for kernel in KERNELS.values():  # as if none had been asked for in this process
        kernel.clear()
    options = {"checkpoint_dtype": checkpoint_dtype, "max_num_seqs": 4, "kv_cache_memory_bytes": 8 << 20}
    options["mamba_ssm_cache_dtype"] = state_dtype
    if family.endswith("+mtp"):
        options["speculative"] = SpeculativeConfig(method="mtp")
    core = build_core(config_of(made_model(family), form, **options))
    late, find = [], Kernel.__missing__

    def found_late(kernel, key):
        late.append((kernel.name, key))
        return find(kernel, key)

    monkeypatch.setattr(Kernel, "__missing__", found_late)
    rng = np.random.default_rng(0)
    prompt = rng.integers(5, 300, 600)
    prompts = [prompt[:400], prompt[:400], np.concatenate([prompt[:300], prompt[500:]]), prompt, prompt[:3]]
    prompts.append(prompt[:9])
    for number, tokens in enumerate(prompts):
        options = {"temperature": float(number % 2), "logprobs": 2 * (number % 2), "presence_penalty": number / 4}
        if number == 5:
            options = {"temperature": 0.0, "allowed_token_ids": [7]}  # an answer that can be drafted
        core.submit(
            generate_request(
                request_id=str(number), prompt=tokens.astype("<i8").tobytes(), seed=1, max_tokens=70, **options
            )
        )
        for _ in range(4 if number > 2 else 500):
            if core.has_work:
                core.step()
    while core.has_work:
        core.step()
    assert core.stats().spec_decode.num_drafts > 0
    core.close()
    assert late == []
