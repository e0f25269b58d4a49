"""A pool of prefill replicas: they compute prompts and hand them over, as in `cairn.proxy.forward`.

429, 5xx, a replica that dies: another one, `max_attempts` in all; then the decode replica does it alone
4xx: the client gets it as it is, unless it is about `kv_transfer_params`: the same replica once more without the hint
     where the last turn's pages are, if there was one; else the decode replica does it alone
"""

import logging
from contextlib import aclosing
from dataclasses import dataclass, replace

import msgspec

from cairn.deploy.ray.exchange import AnswerHead, RelayedRequest
from cairn.deploy.ray.replica_calls import Destination, RelayLimits, ReplicaFailed, SendToReplica, wait_replica
from cairn.errors import InvalidBody, Overloaded
from cairn.proxy.prefixes import HintCache, PrefixDigests, is_batch, prefix_digests
from cairn.proxy.protocol import BadReference, Body, decode_body, handover_of, parse_body, prefill_body, refuses_params
from cairn.proxy.stream_inspector import AnswerSummary
from cairn.routing.rule import RoutedRequest
from cairn.types import Clock, SystemClock

_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
_OF_BODY = (b"content-length", b"content-encoding", b"transfer-encoding")
_MAX_HINTS, _HINT_SECONDS = 10_000, 480.0

logger = logging.getLogger(__name__)


class PrefillRefusal(Exception):
    """A prefill replica's 4xx that is the client's to see."""

    def __init__(self, head: AnswerHead) -> None:
        super().__init__()
        self.head = head


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A request as a decode replica gets it: `plain` without what was handed over, `handed` with it, None where there
    is nothing. `digests`: of its prompt, None where its answer's pages will not be asked for."""

    plain: RelayedRequest
    handed: RelayedRequest | None = None
    digests: PrefixDigests | None = None


class PrefillPool:
    """Sends prompts to prefill replicas, and tells them where the pages of the conversation's last answer are."""

    def __init__(self, send_to_replica: SendToReplica, limits: RelayLimits, clock: Clock | None = None) -> None:
        self._send_to_replica = send_to_replica
        self._limits = limits
        self._hints = HintCache(_MAX_HINTS, _HINT_SECONDS, clock or SystemClock())

    async def hand_over(self, request: RelayedRequest, prompt: RoutedRequest) -> Prefilled:
        """Raises PrefillRefusal."""
        if request.method != "POST" or request.path not in _PATHS:
            return Prefilled(request)
        try:
            body = parse_body(request.body)
        except InvalidBody:
            return Prefilled(request)  # the decode replica says what is wrong
        plain = _with_body(request, decode_body(body, None))
        if request.path == "/v1/completions" and is_batch(body):
            return Prefilled(plain)
        digests = prefix_digests(body)
        handover = await self._compute(request, body, prompt, [] if digests is None else digests.digests)
        handed = None if handover is None else _with_body(request, decode_body(body, handover))
        return Prefilled(plain, handed, digests)

    def record_answer(self, digests: PrefixDigests | None, answer: AnswerSummary) -> None:
        """A decode replica has answered this prompt."""
        self._hints.store_answer(digests, answer)

    async def _compute(
        self, request: RelayedRequest, body: Body, prompt: RoutedRequest, digests: list[bytes]
    ) -> msgspec.Raw | None:
        tried: list[str] = []
        owner, hint = None, self._hints.find(digests)
        while len(tried) < self._limits.max_attempts:
            asked = _with_body(request, prefill_body(request.path, body, hint))
            call = self._send_to_replica(asked, Destination(prompt, tuple(tried), owner))
            try:
                name = await wait_replica(call, self._limits.replica_seconds)
                if name in tried:
                    call.cancel()
                    break
                tried.append(name)
                async with aclosing(call.answer()) as items:
                    head = await anext(items)
                    assert isinstance(head, AnswerHead)
                    parts = [head.body]
                    async for item in items:
                        assert isinstance(item, bytes)
                        parts.append(item)
                head = replace(head, body=b"".join(parts), complete=True)
                if refuses_params(head.status, head.body):
                    if hint is None:
                        return None
                    self._hints.remove(hint, digests)
                    owner, hint = tried.pop(), None
                    continue
                if 400 <= head.status < 500 and head.status != 429:
                    raise PrefillRefusal(head)
                if head.status == 200:
                    return handover_of(head.body)
                logger.warning("prefill replica %s answers with %d", name, head.status)
            except (ReplicaFailed, StopAsyncIteration, BadReference, ValueError) as error:
                tried.append("")
                logger.warning("a prefill replica has failed: %s", error)
            except Overloaded:
                break
        return None


def _with_body(request: RelayedRequest, content: bytes) -> RelayedRequest:
    headers = [(name, value) for name, value in request.headers if name not in _OF_BODY]
    return replace(request, headers=headers, body=content)
