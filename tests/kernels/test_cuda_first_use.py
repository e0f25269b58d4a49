"""No request waits for a kernel to be compiled: whatever steps ask for, the start-up has launched. Both go through
Triton's own launch path, up to the launch, so nothing is computed, and steps are plans written by hand."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.backends import INTERPRETED, ON_GPU

if INTERPRETED or ON_GPU or find_spec("triton") is None:
    pytest.skip("kernels are not launched without a GPU", allow_module_level=True)

from cairn.engine import devices
from cairn.engine.contract import EngineConfig, SpeculativeConfig
from cairn.engine.devices import Device, LoadedModel, kept_weights
from cairn.models.registry import open_model
from cairn.runner.runner import Runner
from cairn.step import (
    Admit,
    DecodeRows,
    Fold,
    FoldSnapshot,
    Image,
    PageCopy,
    PrefillRow,
    Restore,
    Samples,
    Save,
    Score,
    Snapshot,
    StepPlan,
    VerifyRow,
)
from cairn.types import SamplingParams
from doubles.launching_driver import Launch, launches_recorded
from models.packed_checkpoints import FORMATS, write_packed

MAX_MODEL_LEN, MOST_TOKENS, MOST_SEQS, NUM_PAGES = 5120, 512, 100, 900
"""Block tables as wide as a multiple of 16, which those of the start-up are not."""

GREEDY = SamplingParams(temperature=0.0)

ROWS = (1, 2, 15, 16, 17, 48, 64, 100)
LENGTHS = (1, 2, 15, 16, 17, 48, 63, 64, 65, 100, 150, 256, 300, 400, 512)
CONTEXTS = (1, 64, 127, 128, 1000, 4900)


class Memory:
    """Of a GPU, of which nothing is ever taken."""

    def free_and_total(self) -> tuple[int, int]:
        return 1 << 30, 1 << 31

    def start_peak(self) -> None:
        """There is none."""

    def peak_growth(self) -> int:
        return 0


class LaunchedAnew:
    """No graph: the same code is run again."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        return run


class BlackImages:
    """A `VisionEncoder` without a tower."""

    merge, cache_bytes = 2, 0
    counters = None

    def __init__(self, hidden_size: int) -> None:
        self._hidden_size = hidden_size

    def encode(self, image: Image) -> Tensor:
        return torch.zeros(image.length, self._hidden_size)

    def encode_largest(self, max_area: int, max_tokens: int | None) -> None:
        """A tower has none of cairn's kernels."""


class Server:
    """One that has started. `launches`: since then."""

    def __init__(self, folder: Path, launches: list[Launch], **settings: Any) -> None:
        self.config = config = EngineConfig(
            model=str(folder),
            device="cuda",
            max_num_seqs=MOST_SEQS,
            max_num_batched_tokens=MOST_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            **{"dtype": "bfloat16"} | settings,
        )
        self.opened = open_model(folder, config.dtype, keeps=kept_weights(config))
        model = self.opened.build(exact=config.exact, backend="cuda_exact" if config.exact else "cuda")
        vision = BlackImages(model.spec.hidden_size)
        loaded = LoadedModel(config, self.opened, Device("cuda"), model, vision, LaunchedAnew)
        loaded._memory = Memory()
        loaded.measure_available_memory()
        clock = SimpleNamespace(now=lambda: 0.0)
        self.runner: Runner = loaded.allocate(NUM_PAGES, MOST_SEQS, None, clock)
        self.layout, self.vocab_size = self.runner.layout, model.vocab_size
        self.known = {launch.variant for launch in launches}
        self.launches = launches
        launches.clear()
        self._step = 0

    def new_variants(self) -> set[str]:
        """What has been launched since the last call, and not before."""
        found = {launch.told for launch in self.launches if launch.variant not in self.known}
        self.known |= {launch.variant for launch in self.launches}
        assert self.launches, "nothing was launched"
        self.launches.clear()
        return found

    def step(
        self,
        decodes: Sequence[int] = (),
        prefills: Sequence[tuple[int, int]] = (),
        sampling: SamplingParams = GREEDY,
        masked: bool = False,
        banned: bool = False,
        logprobs: int | None = None,
        images: tuple[Image, ...] = (),
        score: bool = False,
        only_drawn: int = 0,
        snapshots: Sequence[tuple[int, int]] = (),
        files: int = 0,
        copies: tuple[PageCopy, ...] = (),
    ) -> None:
        """Sequences that have so many tokens before them, and those that compute so many from there on, each in a slot
        of its own from the first one on; behind them some of which a token is drawn without a row. `snapshots`: row and
        position. `files`: how many slots are restored, and saved."""
        ends = [*(start + 1 for start in decodes), *(start + count for start, count in prefills), *[7] * only_drawn]
        slots = np.arange(len(ends), dtype=np.int32)
        scores = [Score(np.zeros(count, np.int64), 2) if score else None for _, count in prefills]
        file = np.arange(self.layout.pages_per_checkpoint, dtype=np.int32)
        tables = tuple(np.zeros(group.pages_for(MAX_MODEL_LEN), np.int32) for group in self.layout.groups)
        plan = StepPlan(
            self._step,
            admits=tuple(
                Admit(slot, tables, sampling, 1, np.zeros(end, np.int64), (3, 4), logprobs, images)
                for slot, end in zip(slots.tolist(), ends, strict=True)
            ),
            copies=copies,
            restores=tuple(Restore(slot, file) for slot in range(files)),
            saves=tuple(Save(slot, file) for slot in range(files)),
            decodes=DecodeRows(
                slots[: len(decodes)],
                np.array(decodes, np.int32),
                np.zeros(len(decodes), np.int64),
                np.zeros(len(decodes), np.int32),
            ),
            prefills=tuple(
                PrefillRow(slot, start, np.zeros(count, np.int64), 0, scored)
                for slot, ((start, count), scored) in enumerate(zip(prefills, scores, strict=True), len(decodes))
            ),
            snapshots=tuple(Snapshot(row, position, file) for row, position in snapshots),
            samples=Samples(slots, np.array(ends, np.int32), np.full(len(ends), banned)),
        )
        words = np.full(-(-self.vocab_size // 32), -1, np.int32)
        self.runner.launch(plan)
        self.runner.sample(self._step, dict.fromkeys(slots.tolist(), words) if masked else {})
        self.runner.collect(self._step)
        self._step += 1

    def draft(
        self, verifies: Sequence[tuple[int, int]], decodes: int = 0, prompt: int = 0, snapshots: int = 0, **asked: Any
    ) -> None:
        """Sequences that verify so many drafts behind so many tokens, beside decodes and a prompt; and in the next step
        their folds, of which the first has so many checkpoints in it. `asked`: of an `Admit`."""
        tables = tuple(np.zeros(group.pages_for(MAX_MODEL_LEN), np.int32) for group in self.layout.groups)
        file = np.arange(self.layout.pages_per_checkpoint, dtype=np.int32)
        slots, others = np.arange(decodes, dtype=np.int32), range(decodes, decodes + len(verifies))
        ends = [6] * decodes + [start + 1 for start, _ in verifies] + [prompt] * bool(prompt)
        admits = (
            Admit(slot, tables, num_prompt_tokens=1, **{"sampling": GREEDY, "history": np.zeros(end, np.int64)} | asked)
            for slot, end in enumerate(ends)
        )
        rows = (
            VerifyRow(slot, start, np.zeros(1 + count, np.int64), 0)
            for slot, (start, count) in zip(others, verifies, strict=True)
        )
        plan = StepPlan(
            self._step,
            admits=tuple(admits),
            decodes=DecodeRows(slots, slots + 5 - slots, np.zeros(decodes, np.int64), slots - slots),
            verifies=tuple(rows),
            prefills=(PrefillRow(len(ends) - 1, 0, np.zeros(prompt, np.int64), 0),) if prompt else (),
            samples=Samples(slots, slots - slots + 6, np.zeros(decodes, np.bool_)),
        )
        checkpoints = tuple(FoldSnapshot(verifies[0][0] + 1 + number, file) for number in range(snapshots))
        folds = (
            Fold(slot, 1 + max(0, snapshots - 1) * (slot == others[0]), checkpoints if slot == others[0] else ())
            for slot in others
        )
        for each in (plan, StepPlan(self._step + 1, folds=tuple(folds))):
            self.runner.launch(each)
            self.runner.sample(each.step, {})
            self.runner.collect(each.step)
        self._step += 2


DRAWS = {
    "temperature": {"sampling": SamplingParams(0.8, seed=1)},
    "top_k": {"sampling": SamplingParams(0.8, 20, seed=1)},
    "many top_k": {"sampling": SamplingParams(0.8, 300, seed=1)},
    "top_p": {"sampling": SamplingParams(0.8, 0, 0.9, 1)},
    "min_p": {"sampling": SamplingParams(0.8, 0, 1.0, 1, 0.02)},
    "penalties": {"sampling": SamplingParams(0.0, frequency_penalty=1.0, repetition_penalty=1.2)},
    "penalties, drawn": {"sampling": SamplingParams(1.0, 0, 0.9, 1, presence_penalty=1.0)},
    "bias": {"sampling": SamplingParams(0.0, logit_bias=((5, 1.0),))},
    "list": {"sampling": SamplingParams(1.0, seed=1, allowed_token_ids=(5, 6))},
    "bad words": {"sampling": SamplingParams(0.0, bad_words=((5,), (6, 7)))},
    "stop tokens": {"banned": True},
    "mask": {"masked": True},
    "all of it": {
        "sampling": SamplingParams(0.9, 20, 0.9, 1, 0.01, 1.0, 1.0, 1.2, ((5, 1.0),), tuple(range(300)), ((7,),)),
        "masked": True,
        "banned": True,
    },
    "logprobs": {"logprobs": 0},
    "best logprobs": {"logprobs": 3},
    "many logprobs": {"logprobs": 200},
    "listed logprobs": {"logprobs": 0, "sampling": SamplingParams(0.0, logprob_token_ids=(5, 6, 7))},
}


def steps(server: Server) -> Iterator[tuple[str, Callable[[], None]]]:
    """By name, what a server may have to do."""
    step = server.step
    for count in ROWS:
        for context in CONTEXTS:
            yield f"{count} decodes behind {context}", partial(step, [context] * count)
            yield f"{count} decodes behind {context} and a prompt", partial(step, [context] * (count - 1), [(0, 30)])
    for count in LENGTHS:
        yield f"a prompt of {count}", partial(step, (), [(0, count)])
        yield f"{count} tokens behind a hit", partial(step, (), [(70, count)], files=1)
        yield f"a checkpoint behind {count}", partial(step, (), [(0, count)], snapshots=[(0, count)])
    yield "prompts", partial(step, (), [(0, 1), (64, 1), (3, 100), (128, 64)])
    yield "checkpoints", partial(step, [5], [(0, 130), (61, 3)], snapshots=[(0, 6), (1, 64), (1, 100), (2, 62)])
    yield "checkpoints of decodes", partial(step, [5, 6], snapshots=[(0, 6), (1, 7)])
    yield "hits", partial(step, (), [(64, 1)] * 17, files=17)
    yield "a page is copied", partial(step, [5], copies=(PageCopy(0, 1),))
    yield "pages are copied", partial(step, [5], copies=tuple(PageCopy(i, i + 40) for i in range(17)))
    for count in (1, 17):
        yield f"{count} drawn without a row", partial(step, only_drawn=count)
        for name, asked in DRAWS.items():
            yield f"{name} of {count}", partial(step, [500] * count, **asked)
            yield f"{name} of {count} behind prompts", partial(step, (), [(0, 9)] * count, **asked)
    for count in (1, 100):
        yield f"{count} scored tokens", partial(step, (), [(0, count)], score=True)
    picture = Image(2, 6, (1, 4, 6), b"", 0, 0, b"")
    yield "an image", partial(step, (), [(0, 12)], images=(picture,))
    yield "a decode behind an image", partial(step, [20], images=(picture,))
    yield "half an image", partial(step, [20], [(4, 9)], images=(picture,))


def drafting(server: Server) -> Iterator[tuple[str, Callable[[], None]]]:
    """By name, what a server may have to do that drafts."""
    draft = server.draft
    for num_drafts in (1, 11, 15, 32):
        for context in (1, 127, 1000, 4900):
            yield f"{num_drafts} drafts behind {context}", partial(draft, [(context, num_drafts)])
        yield f"{num_drafts} drafts beside decodes", partial(draft, [(9, num_drafts)], decodes=7)
    for count in (2, 8):
        yield f"drafts of {count}", partial(draft, [(70, 3)] * count)
        yield f"drafts of {count} beside a prompt", partial(draft, [(70, 8)] * count, prompt=100)
        yield f"drafts of {count} behind much", partial(draft, [(4900, 8)] * count)
    for count in (1, 2, 3):
        yield f"{count} checkpoints in a fold", partial(draft, [(70, 3), (9, 3)], snapshots=count)
    yield "drafts with penalties", partial(draft, [(70, 3)], sampling=SamplingParams(1.0, seed=1, presence_penalty=1.0))
    yield "drafts with logprobs", partial(draft, [(70, 3)], logprobs=3)


def compiled_late(
    folder: Path, wanted: str = "", steps: Callable[[Server], Iterator[Any]] = steps, **settings: Any
) -> dict[str, list[str]]:
    """By step, of those whose name has `wanted` in it, what is launched that the start-up has not launched."""
    found = {}
    with launches_recorded() as launches:
        server = Server(folder, launches, **settings)
        for name, run in steps(server):
            if wanted in name:
                run()
                if new := server.new_variants():
                    found[name] = sorted(new)
    return found


@pytest.mark.parametrize(
    ("family", "settings"),
    [("nemotron_h", {}), ("qwen3_5", {"enforce_eager": True})],
    ids=["graphs, Mamba2, experts", "no graphs, gated delta rule"],
)
def test_nothing_is_compiled_after_the_start(
    made_model: Callable[[str], Path], family: str, settings: dict[str, Any]
) -> None:
    found = compiled_late(made_model(family), **settings)
    assert not found, "\n".join(f"{name}: {new}" for name, new in found.items())


@pytest.mark.parametrize(
    ("family", "settings"),
    [("nemotron_h", {}), ("qwen3_5", {"exact": True, "dtype": "float32"})],
    ids=["Mamba2", "exact"],
)
def test_nothing_of_drafts_is_compiled_after_the_start(
    made_model: Callable[[str], Path], family: str, settings: dict[str, Any]
) -> None:
    found = compiled_late(
        made_model(family), steps=drafting, speculative=SpeculativeConfig(method="suffix"), **settings
    )
    assert not found, "\n".join(f"{name}: {new}" for name, new in found.items())


def test_no_products_with_codes_are_either(made_model: Callable[[str], Path], tmp_path: Path) -> None:
    """NVFP4, FP8 and int8 in one product, of all numbers of rows."""
    write_packed(made_model("qwen3_5"), tmp_path / "codes", tmp_path / "same", FORMATS["mixed"])
    found = compiled_late(tmp_path / "codes", enforce_eager=True)
    assert not found, "\n".join(f"{name}: {new}" for name, new in found.items())


@pytest.mark.parametrize(
    ("name", "place", "kernel"),
    [
        ("penalties of 1", (devices, "warm_up_plans"), "processors._clear_counts_kernel"),
        ("1 decodes behind 4900", (devices, "warm_up_plans"), "attention._combine_kernel"),
    ],
    ids=["penalties", "attention in many parts"],
)
def test_what_the_start_leaves_out_is_seen(
    made_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str, place: tuple[Any, str], kernel: str
) -> None:
    monkeypatch.setattr(*place, lambda *_: ())
    found = compiled_late(made_model("qwen3_5"), name, enforce_eager=True)
    assert any(told.startswith(kernel) for new in found.values() for told in new)
