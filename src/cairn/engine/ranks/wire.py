"""What rank 0 and the other ranks tell each other: msgpack frames, arrays as raw little-endian bytes.

    rank 0 -> rank r   RankConfig (the first frame), then StepPlan after StepPlan
    rank r -> rank 0   RankStarted, RankReady or BuildRefused, then one StepDone for each plan; Fatal is the last word

Tensors do not travel here: the ranks put their partial sums together among themselves (`layers.process_ranks`).
"""

from dataclasses import replace
from typing import Annotated, Literal, TypeAlias

import msgspec

from cairn.engine.wire import MAX_FRAME_BYTES, BuildRefused, Fatal, Frames
from cairn.step import StepPlan
from cairn.transfer.wire import decode_array, encode_array
from cairn.types import SamplingParams

_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Positive = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
_Step = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Text = Annotated[str, msgspec.Meta(max_length=1 << 16)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
_Bytes = Annotated[bytes, msgspec.Meta(max_length=MAX_FRAME_BYTES)]


class RankService(msgspec.Struct, frozen=True):
    """Something that lives beside a rank's runner, such as its transfer link.

    `factory`: "package.module:function", called with a `worker.RankPlace` and `settings`; it returns a context
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
    quantization: Literal["int8", "fp8", "modelopt"] | None = None


class RankStarted(msgspec.Struct, frozen=True, tag="started"):
    """The rank has its configuration and is about to join the others."""


class RankReady(msgspec.Struct, frozen=True, tag="ready"):
    """The rank has its weights and its memory; its services run."""


class StepDone(msgspec.Struct, frozen=True, tag="done"):
    """The rank has carried step `step` out: all that the plan writes is written."""

    step: _Step


ToRankZero: TypeAlias = RankStarted | RankReady | BuildRefused | StepDone | Fatal


def frames_of_config() -> Frames[RankConfig]:
    return Frames(msgspec.msgpack.Decoder(RankConfig))


def frames_to_rank_zero() -> Frames[ToRankZero]:
    return Frames(msgspec.msgpack.Decoder(ToRankZero))


def frames_of_plans() -> Frames[StepPlan]:
    """A StepPlan's own fields; arrays as raw little-endian bytes, of which they are read-only views once received."""
    return Frames(msgspec.msgpack.Decoder(StepPlan, dec_hook=decode_array), encode_array)


def follower_plan(plan: StepPlan) -> StepPlan:
    """`plan` as the other ranks are told of it: rank 0 alone draws and encodes images, so what only that needs stays
    here."""
    admits = tuple(
        replace(
            admit,
            sampling=SamplingParams(),
            history=None,
            logprobs=None,
            images=tuple(replace(image, digest=b"", rgb=b"") for image in admit.images),
        )
        for admit in plan.admits
    )
    return replace(plan, admits=admits)
