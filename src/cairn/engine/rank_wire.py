"""What rank 0 and the other ranks tell each other: msgpack frames, arrays as raw little-endian bytes.

    rank 0 -> rank r   RankConfig (the first frame), then PlanFrame after PlanFrame
    rank r -> rank 0   Hello, RankReady or RankRefused, then one StepDone for each plan; RankFailed is the last word

Tensors do not travel here: the ranks put their partial sums together among themselves (`layers.process_ranks`).
"""

from dataclasses import replace
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from cairn.engine.wire import MAX_FRAME_BYTES, Frames
from cairn.errors import ConfigError, EngineDead, ModelError
from cairn.step import (
    Fork,
    FromStep,
    Image,
    Keep,
    PageCopy,
    Restore,
    Row,
    Sample,
    SampleOnly,
    Save,
    Score,
    StepPlan,
)
from cairn.types import Pages, SamplingParams

_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Positive = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
_Step = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Text = Annotated[str, msgspec.Meta(max_length=1 << 16)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
_Bytes = Annotated[bytes, msgspec.Meta(max_length=MAX_FRAME_BYTES)]


class RankService(msgspec.Struct, frozen=True):
    """Something that lives beside a rank's runner, such as its transfer link.

    `factory`: "package.module:function", called with a `rank_worker.RankPlace` and `settings`; it returns a context
    manager that is open while the rank serves.
    """

    factory: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    settings: _Bytes = b""


class RankConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that one rank needs to build its share; `rank` and `rendezvous`, the file by which the ranks find each
    other, are filled in by who starts them.

    `join_seconds`: how long the ranks may take to find each other once all of them run. `step_seconds`: how long one
    may keep the others waiting within a step. `services` are started on every rank but 0. `encoder_bytes`: most bytes
    of encoded images that are kept; None leaves a vision model unloaded.
    """

    tp_size: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    model: _Text
    dtype: Literal["auto", "float32", "bfloat16"]
    block_size: _Positive
    num_pages: _Positive
    num_slots: _Positive
    exact: bool
    extra_pages: _Number = 0
    join_seconds: _Seconds = 60.0
    step_seconds: _Seconds = 60.0
    rank: _Number = 0
    rendezvous: _Text = ""
    services: Annotated[tuple[RankService, ...], msgspec.Meta(max_length=16)] = ()
    encoder_bytes: int | None = None


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The rank has its configuration and is about to join the others."""


class RankReady(msgspec.Struct, frozen=True, tag="ready"):
    """The rank has its weights and its memory; its services run."""


class RankRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The rank cannot be built from this configuration."""

    kind: Literal["config", "model"]
    text: _Text

    def error(self) -> ConfigError:
        return ModelError(self.text) if self.kind == "model" else ConfigError(self.text)


class StepDone(msgspec.Struct, frozen=True, tag="done"):
    """The rank has carried step `step` out: all that the plan writes is written."""

    step: _Step


class RankFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The rank has ended, and why."""

    text: _Text


ToRankZero: TypeAlias = Hello | RankReady | RankRefused | StepDone | RankFailed


class _Sample(msgspec.Struct, frozen=True, array_like=True):
    """Without what only the draw needs: rank 0 alone draws."""

    params: SamplingParams
    position: _Step


class _Score(msgspec.Struct, frozen=True, array_like=True):
    targets: _Bytes
    top: _Number


class _File(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint file and the live slot it belongs to, or for a keep the plan's row."""

    place: _Number
    pages: _Bytes
    position: _Step = 0


class _Image(msgspec.Struct, frozen=True, array_like=True):
    """Where an image stands. Its pixels stay with rank 0, which alone encodes them."""

    start: _Step
    length: _Number
    grid: tuple[_Number, _Number, _Number]


class _Row(msgspec.Struct, frozen=True, array_like=True):
    """`tokens`: int64 bytes, or the step that samples the only one."""

    slot: _Number
    start: _Step
    end: _Step
    tokens: _Bytes | int
    pages: tuple[_Bytes, ...]
    kv_write_from: _Step
    decode: bool
    sample: _Sample | None
    images: tuple[_Image, ...] = ()
    score: _Score | None = None


class PlanFrame(msgspec.Struct, frozen=True, array_like=True):
    """A StepPlan in bytes."""

    step: _Step
    copies: tuple[tuple[_Number, _Number], ...]
    restores: tuple[_File, ...]
    forks: tuple[tuple[_Number, _Number], ...]
    saves: tuple[_File, ...]
    rows: tuple[_Row, ...]
    keeps: tuple[_File, ...]
    sample_only: tuple[tuple[_Number, _Sample], ...]


def frames_of_config() -> Frames[RankConfig]:
    return Frames(msgspec.msgpack.Decoder(RankConfig))


def frames_of_plans() -> Frames[PlanFrame]:
    return Frames(msgspec.msgpack.Decoder(PlanFrame))


def frames_to_rank_zero() -> Frames[ToRankZero]:
    return Frames(msgspec.msgpack.Decoder(ToRankZero))


def frame_of_plan(plan: StepPlan) -> PlanFrame:
    return PlanFrame(
        step=plan.step,
        copies=tuple((copy.source, copy.target) for copy in plan.copies),
        restores=tuple(_File(restore.slot, _bytes(restore.pages, "<i4")) for restore in plan.restores),
        forks=tuple((fork.source, fork.target) for fork in plan.forks),
        saves=tuple(_File(save.slot, _bytes(save.pages, "<i4")) for save in plan.saves),
        rows=tuple(_row_frame(row) for row in plan.rows),
        keeps=tuple(_File(keep.row, _bytes(keep.pages, "<i4"), keep.position) for keep in plan.keeps),
        sample_only=tuple((only.slot, _sample_frame(only.sample)) for only in plan.sample_only),
    )


def plan_of_frame(frame: PlanFrame) -> StepPlan:
    """The plan; its arrays are read-only views of the frame. Raises EngineDead where bytes are no whole numbers."""
    return StepPlan(
        step=frame.step,
        copies=tuple(PageCopy(source, target) for source, target in frame.copies),
        restores=tuple(Restore(file.place, _pages(file.pages)) for file in frame.restores),
        forks=tuple(Fork(source, target) for source, target in frame.forks),
        saves=tuple(Save(file.place, _pages(file.pages)) for file in frame.saves),
        rows=tuple(_row(row) for row in frame.rows),
        keeps=tuple(Keep(file.place, file.position, _pages(file.pages)) for file in frame.keeps),
        sample_only=tuple(SampleOnly(slot, _sample(sample)) for slot, sample in frame.sample_only),
    )


def _row_frame(row: Row) -> _Row:
    return _Row(
        slot=row.slot,
        start=row.start,
        end=row.end,
        tokens=row.tokens.step if isinstance(row.tokens, FromStep) else _bytes(row.tokens, "<i8"),
        pages=tuple(_bytes(pages, "<i4") for pages in row.pages),
        kv_write_from=row.kv_write_from,
        decode=row.decode,
        sample=None if row.sample is None else _sample_frame(row.sample),
        images=tuple(_Image(image.start, image.length, image.grid) for image in row.images),
        score=None if row.score is None else _Score(_bytes(row.score.targets, "<i8"), row.score.top),
    )


def _row(row: _Row) -> Row:
    return Row(
        slot=row.slot,
        start=row.start,
        end=row.end,
        tokens=FromStep(row.tokens) if isinstance(row.tokens, int) else _numbers(row.tokens, "<i8").astype(np.int64),
        pages=tuple(_pages(pages) for pages in row.pages),
        kv_write_from=row.kv_write_from,
        decode=row.decode,
        sample=None if row.sample is None else _sample(row.sample),
        images=tuple(Image(image.start, image.length, image.grid, b"", 0, 0, b"") for image in row.images),
        score=None if row.score is None else Score(_numbers(row.score.targets, "<i8"), row.score.top),
    )


def _sample_frame(sample: Sample) -> _Sample:
    return _Sample(replace(sample.params, allowed_tokens=(), bad_words=()), sample.position)


def _sample(sample: _Sample) -> Sample:
    return Sample(sample.params, sample.position)


def _bytes(numbers: NDArray[np.integer[Any]], dtype: str) -> bytes:
    return numbers.astype(dtype, copy=False).tobytes()


def _pages(data: bytes) -> Pages:
    return _numbers(data, "<i4").astype(np.int32, copy=False)


def _numbers(data: bytes, dtype: str) -> NDArray[Any]:
    try:
        return np.frombuffer(data, dtype=dtype)
    except ValueError as error:
        raise EngineDead(f"a plan has {len(data)} bytes where numbers of {dtype} belong: {error}") from error
