"""The producer's half of the handshake: who has proved the secret, and under which session."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from cairn.transfer.contract import Peer
from cairn.transfer.frames import outer_frames, replies, requests
from cairn.transfer.proof import NONCE_BYTES, Role, Seal
from cairn.transfer.transcript import framed_ranks, transcript
from cairn.transfer.wire import (
    VERSION,
    Challenge,
    Denied,
    Frame,
    FromProducer,
    Hello,
    Prove,
    Sealed,
    ToProducer,
    Welcome,
)
from cairn.types import Clock

__all__ = ["HANDSHAKE_SECONDS", "Identity", "Serve", "Sessions"]

Serve: TypeAlias = Callable[[bytes, ToProducer], FromProducer | None]
"""Answers a record of this session; None when the answer comes later, by `Sessions.reply`."""

HANDSHAKE_SECONDS = 5.0
"""A challenge that is not answered by then is forgotten."""

_MAX_WAITING = 256
_MAX_OPEN = 1024


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this server is. `me.engine_id` is new at every start; `layout` is `digest.layout_hash`."""

    me: Peer
    layout: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class _Waiting:
    seal: Seal
    sender: bytes
    answers: bytes
    challenge: Challenge
    until: float


@dataclass(frozen=True, slots=True)
class _Open:
    seal: Seal
    sender: bytes
    welcome: Welcome


class Sessions:
    """Opens sessions and takes what comes in them. `sender` is the connection a frame came by: a session is bound to
    it, so a recorded proof or record is worth nothing to anybody else. `dropped` counts frames that were ignored."""

    def __init__(self, identity: Identity, clock: Clock, random: Callable[[int], bytes]) -> None:
        self._identity = identity
        self._clock = clock
        self._random = random
        self._frames = outer_frames()
        self._requests = requests()
        self._replies = replies()
        self._waiting: OrderedDict[bytes, _Waiting] = OrderedDict()
        self._open: OrderedDict[bytes, _Open] = OrderedDict()
        self._ignored = 0

    @property
    def dropped(self) -> int:
        return self._frames.dropped + self._requests.dropped + self._ignored

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def receive(self, sender: bytes, frame: bytes, serve: Serve) -> bytes | None:
        """The answer to a frame, or None when there is none (yet). `serve` is asked for proven records alone."""
        match self._frames.decode(frame):
            case Hello() as hello:
                answer: Frame | None = self._hello(sender, hello)
            case Prove() as prove:
                answer = self._prove(sender, prove)
            case Sealed() as sealed:
                answer = self._refusal(sender, sealed)
                request = self._request(sealed) if answer is None else None
                if request is not None:
                    reply = serve(sealed.session, request)
                    return None if reply is None else self._frames.encode(self._seal(sealed.session, reply))
            case None:
                return None
            case _:
                answer = None
        if answer is None:
            self._ignored += 1
            return None
        return self._frames.encode(answer)

    def reply(self, session: bytes, reply: FromProducer) -> tuple[bytes, bytes] | None:
        """An answer that took its time, as (sender, frame); None when the session has been forgotten meanwhile."""
        found = self._open.get(session)
        return None if found is None else (found.sender, self._frames.encode(self._seal(session, reply)))

    def _hello(self, sender: bytes, hello: Hello) -> Frame:
        own = self._identity
        if hello.version != VERSION:
            return Denied(
                hello.nonce, f"protocol version {hello.version} here, {VERSION} there: run the same cairn on both"
            )
        if hello.layout != own.layout:
            return Denied(hello.nonce, "the layouts differ: both sides must serve the same model with the same dtypes")
        self._forget()
        for waiting in self._waiting.values():
            if waiting.sender == sender and waiting.answers == hello.nonce:
                return waiting.challenge
        nonce = self._random(NONCE_BYTES)
        seal = Seal(own.secret, transcript(hello, nonce, own.me, own.layout))
        challenge = Challenge(
            hello.nonce, nonce, own.me.engine_id, own.layout, own.me.geometry, seal.proof(Role.PRODUCER)
        )
        self._waiting[nonce] = _Waiting(seal, sender, hello.nonce, challenge, self._clock.now() + HANDSHAKE_SECONDS)
        return challenge

    def _prove(self, sender: bytes, prove: Prove) -> Frame | None:
        self._forget()
        session = self._open.get(prove.session)
        if session is not None:
            right = session.sender == sender and session.seal.proves(Role.CONSUMER, prove.proof)
            return session.welcome if right else None
        waiting = self._waiting.get(prove.session)
        if waiting is None or waiting.sender != sender:
            return Denied(prove.session, "no such challenge: it is too old, or from before a restart")
        del self._waiting[prove.session]
        if not waiting.seal.proves(Role.CONSUMER, prove.proof):
            return Denied(prove.session, "the proof is wrong: both sides need the same --kv-secret-file")
        ranks = list(self._identity.me.ranks)
        mark = waiting.seal.mark(Role.PRODUCER, framed_ranks(ranks))
        welcome = Welcome(prove.session, ranks, mark)
        self._open[prove.session] = _Open(waiting.seal, sender, welcome)
        return welcome

    def _refusal(self, sender: bytes, sealed: Sealed) -> Denied | None:
        session = self._open.get(sealed.session)
        if session is None:
            return Denied(sealed.session, "no such session: it is too old, or from before a restart")
        if session.sender != sender:
            return Denied(sealed.session, "the session belongs to another connection")
        return None

    def _request(self, sealed: Sealed) -> ToProducer | None:
        """The record in a frame of an open session, when it is from its consumer."""
        if not self._open[sealed.session].seal.marks(Role.CONSUMER, sealed.body, sealed.mark):
            return None
        request = self._requests.decode(sealed.body)
        if request is not None:
            self._open.move_to_end(sealed.session)
        return request

    def _seal(self, session: bytes, reply: FromProducer) -> Sealed:
        body = self._replies.encode(reply)
        return Sealed(session, self._open[session].seal.mark(Role.PRODUCER, body), body)

    def _forget(self) -> None:
        """Keep both tables within their bounds: the oldest challenge and the longest idle session go first."""
        now = self._clock.now()
        while self._waiting:
            oldest = next(iter(self._waiting))
            if len(self._waiting) < _MAX_WAITING and self._waiting[oldest].until > now:
                break
            del self._waiting[oldest]
        while len(self._open) >= _MAX_OPEN:
            self._open.popitem(last=False)
