"""Decode steps as graphs, interpreted: replaying a record of the launches gives what launching them anew gives, bit for
bit, and the memory that kernels launched one by one leave, whatever was in the batch that was recorded."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from cairn.kernels.attention_rule import FULL, AttentionRule
from kernels.backends import BACKENDS, INTERPRETED, name_of
from kernels.kernel_calls import Call

CUDA = next((backend for backend in BACKENDS if name_of(backend) == "cuda"), ModuleType("none"))

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="what records launches records those of Triton's interpreter"),
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
]

if INTERPRETED:
    from cairn.kernels import reference
    from cairn.kernels.batch import HostBatch
    from cairn.kernels.graphs import Graphs
    from cairn.kernels.staging import Staging
    from cairn.layers.attention import Attention, Positions
    from cairn.layers.rotary import make_rotary
    from cairn.runner import decode_graphs
    from cairn.runner import runner as runner_module
    from cairn.runner.runner import Runner
    from cairn.step import SAMPLED, Admit, DecodeRows, Samples, Snapshot, StepPlan
    from cairn.types import SamplingParams
    from doubles.counted_device import HostRead
    from doubles.recorded_graphs import GraphMemoryGone, RecordedGraphs
    from kernels.fixed_calls import paged_call
    from kernels.random_batches import NUM_SLOTS as NUM_SLOTS_OF_CALLS
    from kernels.random_batches import RandomBatch, SequenceRows
    from runner.harness import build_tiny, parse, random_weights, raw_config

NUM_SLOTS, NUM_PAGES, PAGE_SIZE, PAGES_EACH = 5, 110, 16, 20
FILES = np.arange(NUM_SLOTS * PAGES_EACH, NUM_SLOTS * PAGES_EACH + 4, dtype=np.int32).reshape(2, 2)
"""Of two pages each, behind the slots'."""

SIZES = (2, 3)
VOCAB = 97


class LaunchedAnew:
    """No graph: the same code is run again."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        return run


def rows(*columns: tuple[int, int, int]) -> "DecodeRows":
    """(slot, position, token) of each."""
    slots, positions, tokens = (np.array(column) for column in zip(*columns, strict=True))
    starts = np.zeros(len(slots), np.int32)
    return DecodeRows(slots.astype(np.int32), positions.astype(np.int32), tokens.astype(np.int64), starts)


def samples(*columns: tuple[int, int]) -> "Samples":
    """(slot, position) of each."""
    slots, positions = (np.array(column, np.int32) for column in zip(*columns, strict=True))
    return Samples(slots, positions, np.zeros(len(slots), np.bool_))


def plans() -> "list[StepPlan]":
    """Batches that grow and shrink: fewer rows than a size has, contexts on both sides of pages' and parts' ends, slots
    in any order, a sequence that has ended (every token is a stop token of slot 4), shared pages, and at last a request
    with more stop tokens than there is room for, which is launched kernel by kernel."""
    tables = [np.arange(slot * PAGES_EACH, (slot + 1) * PAGES_EACH, dtype=np.int32) for slot in range(NUM_SLOTS)]
    stops = [(), (), (), (), tuple(range(VOCAB))]
    greedy = SamplingParams(temperature=0.0)
    admits = tuple(Admit(slot, (tables[slot],), greedy, stop_token_ids=stops[slot]) for slot in range(NUM_SLOTS))
    many_stops = Admit(0, (tables[0],), greedy, stop_token_ids=tuple(range(1000, 1200)))
    shared = rows((1, 128, 3), (2, 15, 9))
    shared.kv_write_from[:] = 129, 7
    return [
        StepPlan(
            1, admits=admits, decodes=rows((3, 5, 41), (1, 127, 7), (4, 256, 8)), samples=samples((4, 257), (3, 6))
        ),
        StepPlan(2, decodes=rows((4, 257, SAMPLED)), samples=samples((4, 258))),
        StepPlan(3, decodes=shared),
        StepPlan(
            4,
            decodes=rows((0, 16, 1), (3, 6, SAMPLED), (2, 300, 5)),
            snapshots=(Snapshot(2, 301, FILES[0]), Snapshot(0, 17, FILES[1])),
        ),
        StepPlan(5, admits=(many_stops,), decodes=rows((0, 17, 2))),
        StepPlan(6, decodes=rows((0, 18, 3))),
    ]


FEW_HEADS = {
    "hidden_size": 16,
    "vocab_size": VOCAB,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "mamba_num_heads": 2,
    "n_groups": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
"""Programs take milliseconds."""


class Tiny:
    """A model, and what its memory is after each of the plans, launched kernel by kernel."""

    def __init__(self, pattern: str) -> None:
        config = parse(raw_config(pattern, **FEW_HEADS))
        model = build_tiny(config, random_weights(config, 3), False, backend="cuda")
        layers = [
            (norm, replace(mixer, positions=Positions(0)) if isinstance(mixer, Attention) else mixer)
            for norm, mixer in model.layers
        ]
        self._model = replace(model, layers=tuple(layers), rotaries=(make_rotary(16, 10_000.0),))
        self._layout = config.layout(PAGE_SIZE, 4)
        self.eager = [*self.memory(None)]

    def memory(self, graphs: "Graphs | None") -> Iterator[list[Tensor]]:
        """Pages, states, final hidden states and newest tokens of all slots, after each of the plans."""
        runner = Runner(self._model, self._layout, NUM_PAGES, NUM_SLOTS, exact=False)
        generator = torch.Generator().manual_seed(1)
        pages = runner.pool.view(torch.float32)
        states = [tensor for layer in runner._live.recurrent for tensor in (layer.conv, layer.state)]
        for tensor in (pages, *states):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        if graphs is not None:
            runner.capture_graphs(graphs, SIZES, 320, lambda size: None)
        for plan in plans():
            runner.run(plan)
            # What a sequence computes behind its end is nobody's.
            for layer in runner._paged:
                layer.keys[4 * PAGES_EACH + 16, :, 1:3] = layer.values[4 * PAGES_EACH + 16, :, 1:3] = 0
            kept = (runner._live.hidden, runner._slot_tensors.last_tokens, *states)
            yield [pages.clone(), *(tensor[:-1].clone() for tensor in kept)]

    def check(self) -> list[list[Tensor]]:
        """The memory that graphs leave. Raises AssertionError where kernels launched one by one leave another."""
        graphs, memory = RecordedGraphs(), list[list[Tensor]]()
        for found, wanted in zip(self.memory(graphs), self.eager, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
            memory.append(found)
        assert (graphs.num_captured, graphs.num_replays) == (len(SIZES), len(plans()) - 2)
        return memory


@pytest.fixture(scope="module")
def with_experts() -> Tiny:
    """Every kind of layer whose decodes are launched by the number of rows or by lengths."""
    return Tiny("M*E")


@pytest.fixture(scope="module")
def without_experts() -> Tiny:
    return Tiny("M*")


def test_a_replay_is_what_launching_anew_is_and_leaves_what_eager_steps_leave(with_experts: Tiny) -> None:
    for found, wanted in zip(with_experts.check(), with_experts.memory(LaunchedAnew()), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


HEADS, LENGTHS = (4, 2, 16), (650, 1, 129, 257, 64)


def check_attention(module: ModuleType) -> None:
    """Of decodes whose lengths the host does not know, with a padding row; for models of several greatest lengths: all
    keys in one part, two parts, and more of them than most sequences need."""
    decodes = RandomBatch(tuple(SequenceRows(slot, length - 1, 1) for slot, length in enumerate(LENGTHS)), ())
    for rule in (FULL, AttentionRule(window=200), AttentionRule(chunk=100)):
        call = paged_call("attention", decodes, HEADS, 16, torch.float32, rule=rule, sinks=True)
        check_captured(module, call, rule, (1, 256, 1280) if rule == FULL else (256,))


def check_captured(module: ModuleType, call: Call, rule: AttentionRule, greatest: tuple[int, ...]) -> None:
    (wanted,) = call.copied().run(reference)
    batch = call.batch.batch(CUDA, call.block_tables)
    padded = {
        "slots": torch.cat([batch.slots, torch.tensor([NUM_SLOTS_OF_CALLS], dtype=torch.int32)]),
        "seq_lens": torch.cat([batch.seq_lens, torch.zeros(1, dtype=torch.int32)]),
    }
    q = torch.cat([call.operands["q"], torch.ones(1, HEADS[0], HEADS[2])])
    for longest in greatest:
        host = HostBatch.captured(len(LENGTHS) + 1, longest)
        metadata = CUDA.build_metadata(host, Staging())
        captured = msgspec.structs.replace(batch, host=host, metadata=metadata, **padded)
        operands = q, call.operands["keys"], call.operands["values"], 0, captured, rule, call.operands["sinks"]
        found = module.attention(*operands)
        torch.testing.assert_close(found[:-1], wanted, rtol=1e-4, atol=1e-4)
        assert not found[-1].any()


def test_attention_of_a_graph_takes_lengths_from_the_device() -> None:
    check_attention(sys.modules["cairn.kernels.cuda.attention"])


@pytest.mark.parametrize(
    ("text", "replacement"),
    [
        ("tl.cdiv(tl.cdiv(length, num_splits), LEAST)", "tl.cdiv(length // num_splits, LEAST)"),
        ("tl.cdiv(tl.cdiv(length, num_splits), LEAST)", "(tl.cdiv(length, num_splits) // LEAST)"),
        ("length, splits = 0, captured_splits", "length, splits = MIN_SPLIT, captured_splits"),
        ("tl.where(count > 0, total / weight, 0.0)", "total / weight"),
    ],
    ids=["a length is rounded down", "a part is rounded down", "a part's length is fixed", "padding is divided by 0"],
)
def test_a_mutant_of_attention_is_found(tmp_path: Path, text: str, replacement: str) -> None:
    with pytest.raises(AssertionError):
        check_attention(load_changed(tmp_path, "cairn.kernels.cuda.attention", text, replacement))


MUTANTS = (
    ("rows are those of the recording", "        self._view(shape).copy_(rows)\n", ""),
    ("padding rows write into the first page", "rows[4], rows[7] = self._num_slots, 1", "rows[4] = self._num_slots"),
    ("padding rows are the first slot's", "rows[4], rows[7] = self._num_slots, 1", "rows[7] = 1"),
    (
        "tables are not kept",
        "forward_pass.replay = graphs.capture(forward_pass.run)",
        "forward_pass.replay, forward_pass.run, forward_pass.metadata = graphs.capture(forward_pass.run), None, None",
    ),
    (
        "lengths are taken from the host",
        "seq_lens=seqs[2]",
        "seq_lens=torch.tensor(seqs[2].tolist(), dtype=torch.int32)",
    ),
    ("the host asks for a number", "state_slots=state_slots,", "state_slots=state_slots + int(seqs[2].max()) * 0,"),
    ("tokens are not the newest", "tokens=tokens,", "tokens=rows[0, : shape.num_tokens].long().clamp(min=0),"),
    ("a sequence that has ended goes on", "state_slots=state_slots,", "state_slots=seqs[0],"),
    (
        "positions are the recording's",
        "positions=rows[1:4, : shape.num_tokens].long()",
        "positions=rows[1:4, : shape.num_tokens].long() * 0",
    ),
    ("lengths are off by one", "decodes.positions + 1,", "decodes.positions,"),
    ("there is no room for stop tokens", "self._slot_tensors.reserve_stop_tokens(MOST_STOP_TOKENS)", "pass"),
    ("a graph is replayed when stop tokens move", "len(admit.stop_token_ids) > width", "False"),
    ("a graph is replayed when stop tokens have moved", "is not self._stop_tokens or any", "is None or any"),
)


def load_changed(folder: Path, name: str, text: str, replacement: str) -> ModuleType:
    source = Path(str(sys.modules[name].__file__)).read_text()
    assert text in source, f"{name} no longer has {text!r}"
    path = folder / "changed.py"
    path.write_text(source.replace(text, replacement))
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("text", "replacement"), [mutant[1:] for mutant in MUTANTS], ids=[m[0] for m in MUTANTS])
def test_a_mutant_is_found(
    without_experts: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, replacement: str
) -> None:
    monkeypatch.setattr(
        runner_module, "DecodeGraphs", load_changed(tmp_path, decode_graphs.__name__, text, replacement).DecodeGraphs
    )
    with pytest.raises((AssertionError, GraphMemoryGone, HostRead)):
        without_experts.check()


def test_states_that_a_graph_does_not_put_away_are_missed(
    without_experts: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runner, "_save", lambda *_: None)
    with pytest.raises(AssertionError):
        without_experts.check()


def test_the_source_as_it_is_passes(without_experts: Tiny) -> None:
    without_experts.check()
