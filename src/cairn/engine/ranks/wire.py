"""What rank 0 and the other ranks tell each other: msgpack frames, arrays as raw little-endian bytes.

    rank 0 -> rank r   RankConfig (the first frame), RankSizes, then StepPlan after StepPlan
    rank r -> rank 0   RankStarted, RankLoaded, on a GPU RankAvailableMemory, RankReady, then one StepDone for each
    plan;
                       RankAtBarrier in between; BuildRefused or Fatal is the last word

Tensors do not travel here: the ranks put their partial sums together among themselves (`layers.process_ranks`).
"""

from dataclasses import replace
from typing import Annotated, Any, TypeAlias

import msgspec

from cairn.engine.contract import EngineConfig
from cairn.engine.wire import MAX_FRAME_BYTES, BuildRefused, Fatal, Frames, encode_config
from cairn.step import StepPlan
from cairn.transfer.wire import decode_array, encode_array
from cairn.types import SamplingParams

_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Positive = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
_Step = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Text = Annotated[str, msgspec.Meta(max_length=1 << 16)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
_Bytes = Annotated[bytes, msgspec.Meta(max_length=MAX_FRAME_BYTES)]


_Factory = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
"""package.module:name"""


class RankService(msgspec.Struct, frozen=True):
    """Something that lives beside a rank's runner, such as its transfer link.

    `factory`: a function, called with a `worker.RankPlace` and `settings`; it returns a context
    manager that is open while the rank serves.
    """

    factory: _Factory
    settings: _Bytes = b""


class RankConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that one rank needs to load its share; `rank` and `rendezvous`, the file by which the ranks find each
    other, are filled in by who starts them.

    `engine`: what the whole engine is built of. `serves_mtp`: whether the checkpoint's head that drafts is a part of
    the model, which rank 0 has decided. `join_seconds`: how long the ranks may take to find each other once all of them
    run. `step_seconds`: how long one may keep the others waiting within a step. `services` are started on every rank
    but 0. `graphs`: what makes a `runner.decode_graphs.Graphs`; None where decode steps are launched kernel by kernel.
    """

    engine: EngineConfig
    serves_mtp: bool = False
    join_seconds: _Seconds = 60.0
    step_seconds: _Seconds = 60.0
    rank: _Number = 0
    rendezvous: _Text = ""
    services: Annotated[tuple[RankService, ...], msgspec.Meta(max_length=16)] = ()
    graphs: _Factory | None = None

    @property
    def tp_size(self) -> int:
        return self.engine.tensor_parallel_size


class RankSizes(msgspec.Struct, frozen=True):
    """The memory that every rank allocates: `num_pages` of the pool, `num_slots` for requests computed at once."""

    num_pages: _Positive
    num_slots: _Positive


class RankStarted(msgspec.Struct, frozen=True, tag="started"):
    """The rank has its configuration and is about to join the others."""


class RankLoaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The rank has joined the others and has its weights."""


class RankAtBarrier(msgspec.Struct, frozen=True, tag="reached"):
    """The rank has launched, or done, what all ranks do together; `what` is the same on all of them."""

    what: _Text


class RankAvailableMemory(msgspec.Struct, frozen=True, tag="room"):
    """The bytes that the rank's GPU has for its pool and its running states."""

    num_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]


class RankReady(msgspec.Struct, frozen=True, tag="ready"):
    """The rank has its memory, too; its services run."""


class StepDone(msgspec.Struct, frozen=True, tag="done"):
    """The rank has carried step `step` out: all that the plan writes is written."""

    step: _Step


ToRankZero: TypeAlias = (
    RankStarted | RankLoaded | RankAtBarrier | RankAvailableMemory | RankReady | BuildRefused | StepDone | Fatal
)


def frames_of_config() -> Frames[RankConfig]:
    return Frames(msgspec.msgpack.Decoder(RankConfig, dec_hook=_decode_engine), _encode_engine)


def _encode_engine(value: object) -> bytes:
    if not isinstance(value, EngineConfig):
        raise NotImplementedError(f"{type(value)} does not go on this wire")
    return encode_config(value)


def _decode_engine(kind: type, value: Any) -> EngineConfig:
    """Raises ValueError, of which msgspec makes its own."""
    if kind is not EngineConfig or not isinstance(value, bytes):
        raise ValueError(f"{kind} of {type(value)}")
    return EngineConfig.model_validate_json(value)


def frames_of_sizes() -> Frames[RankSizes]:
    return Frames(msgspec.msgpack.Decoder(RankSizes))


def frames_to_rank_zero() -> Frames[ToRankZero]:
    return Frames(msgspec.msgpack.Decoder(ToRankZero))


def frames_of_plans() -> Frames[StepPlan]:
    """A StepPlan's own fields; arrays as raw little-endian bytes, of which they are read-only views once received."""
    return Frames(msgspec.msgpack.Decoder(StepPlan, dec_hook=decode_array), encode_array)


def follower_plan(plan: StepPlan) -> StepPlan:
    """`plan` as the other ranks are told of it: rank 0 alone samples and encodes images, so what only that needs stays
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
    return msgspec.structs.replace(plan, admits=admits)
