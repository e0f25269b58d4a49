"""A pool of prefill replicas: they compute prompts and hand them over, as in `cairn.proxy.forward`.

429, 5xx, a replica that dies: another one, `max_attempts` in all; then the decode replica does it alone
4xx: the client gets it as it is, unless it is about `kv_transfer_params`: then the decode replica does it alone
"""

import logging
from contextlib import aclosing
from dataclasses import replace

import msgspec

from cairn.deploy.ray.exchange import AnswerHead, RelayedRequest
from cairn.deploy.ray.replica_calls import Destination, RelayLimits, ReplicaFailed, SendToReplica, wait_replica
from cairn.errors import InvalidBody, Overloaded
from cairn.proxy.prefixes import is_batch
from cairn.proxy.protocol import BadReference, decode_body, handover_of, parse_body, prefill_body, refuses_params
from cairn.routing.rule import RoutedRequest

_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
_OF_BODY = (b"content-length", b"content-encoding", b"transfer-encoding")

logger = logging.getLogger(__name__)


class PrefillRefusal(Exception):
    """A prefill replica's 4xx that is the client's to see."""

    def __init__(self, head: AnswerHead) -> None:
        super().__init__()
        self.head = head


class PrefillPool:
    """Sends prompts to prefill replicas."""

    def __init__(self, send_to_replica: SendToReplica, limits: RelayLimits) -> None:
        self._send_to_replica = send_to_replica
        self._limits = limits

    async def hand_over(
        self, request: RelayedRequest, prompt: RoutedRequest
    ) -> tuple[RelayedRequest, RelayedRequest | None]:
        """The request as a decode replica gets it without what was handed over, and with it: None where there is
        nothing. Raises PrefillRefusal."""
        if request.method != "POST" or request.path not in _PATHS:
            return request, None
        try:
            body = parse_body(request.body)
        except InvalidBody:
            return request, None  # the decode replica says what is wrong
        plain = _with_body(request, decode_body(body, None))
        if request.path == "/v1/completions" and is_batch(body):
            return plain, None
        handover = await self._compute(_with_body(request, prefill_body(request.path, body, None)), prompt)
        return plain, None if handover is None else _with_body(request, decode_body(body, handover))

    async def _compute(self, request: RelayedRequest, prompt: RoutedRequest) -> msgspec.Raw | None:
        tried: list[str] = []
        while len(tried) < self._limits.max_attempts:
            call = self._send_to_replica(request, Destination(prompt, tuple(tried)))
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
                if 400 <= head.status < 500 and head.status != 429:
                    if head.status in (400, 422) and refuses_params(head.body):
                        return None
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
