"""`--exact` on the CUDA kernels: the bits of models that are driven by hand, and the code that their batches run.

Interpreted, products are made one term after the other, as compiled ones are. What the interpreter cannot see is which
code a GPU would run, so that is held apart from the bits: every launch with all that decides about it.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.backends import DEVICES, INTERPRETED, ON_GPU

if not INTERPRETED and not ON_GPU:
    pytest.skip("there is nothing that runs Triton's kernels", allow_module_level=True)
pytest.importorskip("tokenizers", reason="the runner needs what `make gpu-wheels` collects")

from cairn.kernels import cuda_exact
from cairn.kernels.cuda.device import VARYING
from cairn.kernels.operations import OPERATIONS
from cairn.step import PageCopy, Restore, Snapshot
from kernels.comparison import check_against_reference, same_bits
from kernels.cuda_configurations import CONFIGURATIONS, module_of
from kernels.kernel_calls import Call
from kernels.random_batches import RandomBatch, SequenceRows
from kernels.test_cuda_mutants import load
from runner.harness import Driver, build_tiny, parse, prompt, random_weights, raw_config
from runner.test_exactness import MODELS, alone, equal, saved

pytestmark = [
    pytest.mark.usefixtures("products_as_on_a_gpu"),
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
]

DEVICE = DEVICES[cuda_exact]


def driven(config: Any, weights: dict[str, Tensor], backend: str = "cuda_exact") -> Driver:
    model = build_tiny(config, weights, True, backend=backend, device=DEVICE)
    return Driver(config, model, exact=True, num_pages=4096, num_slots=16)


def nemotron(pattern: str, **changes: Any) -> Driver:
    changes.pop("num_pages", None)
    config = parse(raw_config(pattern, **changes))
    return driven(config, random_weights(config, 0))


def qwen(**changes: Any) -> Driver:
    text = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 56,
        "max_position_embeddings": 4096,
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 1,
        "linear_key_head_dim": 12,
        "linear_num_value_heads": 1,
        "linear_value_head_dim": 20,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    }
    config = parse({"model_type": "qwen3_5_text", **text, **changes})
    return driven(config, random_weights(config, 0))


SMALL = {"mamba_num_heads": 1, "n_groups": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
DRIVERS: dict[str, Callable[[], Driver]] = {
    "mamba2": partial(nemotron, "M*E", **SMALL),
    "delta": qwen,
}
if ON_GPU:
    DRIVERS |= {name: partial(nemotron, pattern, **changes) for name, (pattern, changes) in MODELS.items()}
    # All cases of the CPU's suite, too.
    from runner.test_exactness import (  # noqa: F401
        test_a_saved_state_goes_on_as_its_source,
        test_batched_equals_alone,
        test_chunked_equals_whole,
        test_full_hit_without_a_forward_pass,
        test_kept_state_equals_that_of_a_run_that_ends_there,
        test_preempted_and_replayed_equals_undisturbed,
        test_resumed_equals_uncached,
        test_snapshots_in_a_later_chunk_and_in_decode_rows,
        test_the_self_test_passes,
        test_tokens_fed_from_the_step_that_sampled_them,
    )


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> Driver:
    return DRIVERS[request.param]()


def test_a_sequence_has_the_same_bits_however_it_came_to_be(driver: Driver) -> None:
    """Whole and alone; cut on the grid, beside others that decode and prefill; out of a checkpoint on the grid with
    pages that are shared inside of one, after a preemption; out of the one at the prompt's end."""
    tokens, answer = prompt(67, 1), prompt(2, 2)
    wanted, state = alone(driver, tokens, answer)

    cut, other, third = (driver.sequence(slot, 80) for slot in (1, 2, 3))
    at_64, at_67 = driver.file(), driver.file()
    driver.run(driver.row(other, prompt(4, 3)), driver.row(cut, tokens[:64]), snapshots=[Snapshot(1, 64, at_64)])
    rows = (driver.row(other, [9], decode=True), driver.row(third, prompt(2, 4)), driver.row(cut, tokens[64:]))
    found = [driver.run(*rows, snapshots=[Snapshot(2, 67, at_67)])[2]]
    for token in answer:
        rows = (driver.row(other, [7], decode=True), driver.row(cut, [token], decode=True))
        found.append(driver.run(*rows)[1])
    assert equal(found, wanted)
    assert torch.equal(saved(driver, 1), state)

    resumed, repeated = driver.sequence(5, 80), driver.sequence(6, 80)
    resumed.pages[:4], resumed.position, resumed.kv_write_from = cut.pages[:4], 64, 66
    repeated.position = 67
    # without attention there are none
    sources = [*cut.pages[4:5], *cut.pages[:5]]
    copies = map(PageCopy, map(int, sources), map(int, [*resumed.pages[4:5], *repeated.pages[:5]]))
    restores = (Restore(5, at_64), Restore(6, at_67))
    rows = (driver.row(repeated, answer[:1], decode=True), driver.row(resumed, tokens[64:]))
    first, second = driver.run(*rows, copies=tuple(copies), restores=restores)
    assert equal([second, first], wanted[:2])
    rows = (driver.row(resumed, answer[:1], decode=True), driver.row(repeated, answer[1:], decode=True))
    first, second = driver.run(*rows)
    assert equal([first, second], wanted[1:])
    assert torch.equal(saved(driver, 6), state)


def test_products_of_the_exact_backend_are_right() -> None:
    for rows in (1, 16, 33):
        call = linear_of(rows)
        for bias in (None, call.batch.numbers(70, salt=2).float()):
            weight = call.batch.numbers(70, 96, salt=1).float()
            x = call.batch.numbers(rows, 96).float()
            operands = {"x": x, "weight": weight, "bias": bias}
            check_against_reference(cuda_exact, replace(call, operands=operands), torch.float32)
        head = Call("lm_head", call.batch, {"hidden": x, "weight": weight})
        check_against_reference(cuda_exact, head, torch.float32)
    check_against_reference(cuda_exact, experts_of(3), torch.float32)


def test_the_check_at_the_start_passes(driver: Driver) -> None:
    driver.runner.get_ready()


def test_products_whose_rows_depend_on_the_others_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    products = sys.modules["cairn.kernels.cuda_exact.products"]
    real = products._multiply
    monkeypatch.setattr(products, "_multiply", lambda x, *rest: real(x, *rest) + (1e-6 if len(x) > 16 else 0))
    weight = torch.randn(24, 32, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    assert cuda_exact.find_dependent_height(weight, None, torch.Generator().manual_seed(3)) == 1


# -- which code runs -------------------------------------------------------------------------------------------------


class Recorder:
    """Stands where a kernel stood; writes down what decides which code is run, and runs nothing."""

    def __init__(self, name: str, kernel: Any, launches: list[Any]) -> None:
        self._name, self._kernel, self._launches = name, kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*operands: Any, **constants: Any) -> None:
            known = dict(zip(self._kernel.arg_names, operands, strict=False))
            decides = {
                name: (value.dtype, value.data_ptr() % 16) if isinstance(value, Tensor) else value
                for name, value in known.items()
                if name not in VARYING
            }
            self._launches.append((self._name, decides, constants))

        return launch


def record_launches(monkeypatch: pytest.MonkeyPatch, modules: Iterable[ModuleType]) -> list[Any]:
    """Of all kernels of these modules from now on."""
    launches: list[Any] = []
    for module in modules:
        for key in [key for key in vars(module) if key.startswith("_") and key.endswith("_kernel")]:
            monkeypatch.setattr(module, key, Recorder(f"{module.__name__}.{key}", getattr(module, key), launches))
    return launches


def launches_of(driver: Driver, launches: list[Any], decodes: int, prefills: tuple[int, ...]) -> list[Any]:
    """What a step launches, in its order, with decode rows behind contexts of very different lengths."""
    rows = []
    for slot in range(decodes):
        track = driver.sequence(slot, 2200)
        track.position = 2000 if slot == 1 else 64 * slot + 3
        rows.append(driver.row(track, [slot], decode=True))
    for slot, length in enumerate(prefills, decodes):
        rows.append(driver.row(driver.sequence(slot, length), prompt(length, length)))
    launches.clear()
    driver.run(*rows)
    return list(launches)


AWKWARD: dict[str, Callable[[], Driver]] = {
    # Rows whose parts begin and end at no multiples of 16.
    "nemotron": partial(nemotron, "M*E-", **MODELS["one-group"][1] | MODELS["many-query-heads"][1]),
    "qwen": partial(qwen, linear_num_value_heads=3, linear_key_head_dim=10, linear_value_head_dim=14),
}


INTERPRETED_ONLY = pytest.mark.skipif(not INTERPRETED, reason="launches are written down, not made")


@INTERPRETED_ONLY
@pytest.mark.parametrize("name", AWKWARD)
def test_every_batch_runs_the_same_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants, options, alignment and every number that a kernel may be compiled for."""
    launches = record_launches(monkeypatch, map(module_of, CONFIGURATIONS))
    driver = AWKWARD[name]()
    mixed = launches_of(driver, launches, 1, (1,))
    modules = {kernel.rpartition("._")[0].rpartition(".")[2] for kernel, *_ in mixed}
    assert modules >= {"attention", "conv", "products", "norms", "write_kv"} | (
        {"experts"} if name == "nemotron" else set()
    )
    for _, _, constants in mixed:
        assert constants.get("PRECISION", "ieee") == "ieee" and constants.get("SPLIT", True)
    assert mixed == launches_of(driver, launches, 3, (130, 7))
    assert launches_of(driver, launches, 1, ()) == launches_of(driver, launches, 6, ())
    assert launches_of(driver, launches, 0, (1,)) == launches_of(driver, launches, 0, (200, 64, 1))
    # Of a single row the parts of a fused product would lie otherwise.
    monkeypatch.setattr(sys.modules["cairn.kernels.cuda_exact.operands"], "lay_out_rows", lambda x: x)
    assert launches_of(driver, launches, 0, (1,)) != launches_of(driver, launches, 0, (200, 64, 1))


def linear_of(rows: int) -> Call:
    batch = prefill_of(rows)
    return Call("linear", batch, {"x": batch.numbers(rows, 32).float(), "weight": torch.ones(16, 32), "bias": None})


def experts_of(rows: int) -> Call:
    batch = prefill_of(rows)
    chosen = batch.numbers(rows, 5, salt=1).topk(3, dim=-1).indices
    operands = {
        "x": batch.numbers(rows, 16).float(),
        "topk_ids": chosen,
        "topk_weights": batch.numbers(rows, 3, salt=2).float(),
        "up": batch.numbers(5, 16, 16, salt=3).float(),
        "down": batch.numbers(5, 16, 16, salt=4).float(),
    }
    return Call("experts", batch, operands)


def attention_of(length: int) -> Call:
    batch = RandomBatch((SequenceRows(0, length - 1, 1),), ())
    pages = torch.zeros(1, 1, 64, 16)
    table = torch.zeros(9, 700, dtype=torch.int32)
    return Call("attention", batch, {"q": torch.zeros(1, 2, 16), "keys": pages, "values": pages, "group": 0}, (table,))


def prefill_of(rows: int) -> RandomBatch:
    return RandomBatch((), (SequenceRows(0, 0, rows),), seed=8)


MUTANTS: Mapping[str, tuple[str, str, str, Callable[[int], Call], tuple[int, int]]] = {
    "a product's tile is chosen from the number of rows": (
        "exact_products",
        "tile, options = _tile(out_width, width)",
        "tile, options = _tile(out_width, width); tile['ROWS'] = 16 if rows <= 16 else 32",
        linear_of,
        (3, 40),
    ),
    "a decode's parts are chosen from the batch": (
        "attention",
        "if fixed:",
        "if False and fixed:",
        attention_of,
        (100, 40000),
    ),
    "a decode of one part is not put together": (
        "attention",
        "split = splits > 1 or fixed",
        "split = splits > 1",
        attention_of,
        (100, 40000),
    ),
    "more parts are put together at a time where there are more": (
        "attention",
        "[splits > _COMBINED[0] and not fixed]",
        "[splits > _COMBINED[0]]",
        attention_of,
        (100, 40000),
    ),
    "few tokens go to their experts in another way": (
        "experts",
        "if tokens <= _FEW_TOKENS and not metadata.exact:",
        "if tokens <= _FEW_TOKENS:",
        experts_of,
        (2, 40),
    ),
    "experts' blocks are as high as they have rows": (
        "experts",
        "_FIXED_ROWS if metadata.exact else",
        "",
        experts_of,
        (2, 200),
    ),
}
"""A module, a text of it and what stands in its place, and a call with two numbers that launches two things then. Texts
are of other lengths: Python takes two files of one name, size and second for the same."""


def changed_backend(folder: Path, name: str, text: str, replacement: str) -> tuple[ModuleType, ModuleType]:
    """The exact backend with one module changed, and that module."""
    source = Path(str(module_of(name).__file__)).read_text()
    assert text in source, f"{name} no longer has {text!r}"
    module = load(folder, name, source.replace(text, replacement))
    backend = ModuleType("changed")
    backend.__dict__.update({each: getattr(module, each, getattr(cuda_exact, each)) for each in OPERATIONS})
    return backend, module


def launched(call: Call, backend: ModuleType, launches: list[Any]) -> list[Any]:
    launches.clear()
    call.run(backend)
    return list(launches)


@INTERPRETED_ONLY
@pytest.mark.parametrize("name", MUTANTS)
def test_code_that_is_chosen_by_the_batch_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, text, replacement, make, (few, many) = MUTANTS[name]
    for by in (text, replacement):
        backend, changed = changed_backend(tmp_path, module, text, by)
        with monkeypatch.context() as patch:
            launches = record_launches(patch, [changed, module_of("expert_gemv")])
            found = [launched(make(number), backend, launches) for number in (few, many)]
        assert found[0] and (found[0] == found[1]) == (by == text)


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_sum_over_experts_in_an_order_of_the_batch_is_found(is_changed: bool, tmp_path: Path) -> None:
    text = "lowest = tl.min(experts, axis=0)"
    left = "tl.max(tl.where(experts < 2147483647, experts, -1), axis=0)"
    other = f"lowest = tl.where(token % 2 == 0, tl.min(experts, axis=0), {left})"
    backend, _ = changed_backend(tmp_path, "experts", text, other if is_changed else text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DEVICES, backend, DEVICE)
        whole = experts_of(8)
        (together,) = whole.run(backend)
        (behind,) = whole.of_rows(slice(1, 8), prefill_of(7)).run(backend)
    assert same_bits(together[1:], behind) != is_changed
