"""The replicas that a router knows: their loads, and their KV events on the way into the rule's index."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from cairn.deploy.ray.load import ReplicaReport, parse_report
from cairn.errors import ConfigError
from cairn.routing.index import PrefixIndex
from cairn.routing.rule import ReplicaLoad, RoutedRequest, RoutingRule
from cairn.routing.subscriber import KvEventSubscriber
from cairn.types import Clock, SystemClock

_MAX_OPEN = 1 << 16
_MAX_SAMPLE_EVERY = 8
"""Of blocks of 16 tokens, in a fleet that has more than the index: a prompt's cached part is known up to 128 tokens."""
_UNKNOWN = ReplicaLoad()
"""Of a replica that has told nothing yet: always the same one, which the rule sees has not changed."""

logger = logging.getLogger(__name__)


class Subscriber(Protocol):
    """`KvEventSubscriber`, as far as it is used."""

    async def run(self) -> None: ...

    def close(self) -> None: ...


Subscribe = Callable[[str, ReplicaReport], Subscriber]


class Fleet:
    """Ranks the replicas for requests. One event loop only.

    `subscribe`: makes the subscriber of a replica's KV events; raises ConfigError for an address that is none.
    """

    def __init__(
        self, rule: RoutingRule | None = None, subscribe: Subscribe | None = None, clock: Clock | None = None
    ) -> None:
        self.rule = rule or RoutingRule(index=PrefixIndex(max_sample_every=_MAX_SAMPLE_EVERY))
        self._subscribe = subscribe or self._connect
        self._clock = clock or SystemClock()
        self._reports: dict[str, ReplicaReport] = {}
        self._loads: dict[str, ReplicaLoad] = {}
        self._following: dict[str, tuple[ReplicaReport, asyncio.Task[None]]] = {}
        self._open: dict[tuple[str, str], RoutedRequest] = {}
        self._peaks: dict[str, tuple[int, int]] = {}

    def update(self, reports: Mapping[str, Mapping[str, Any]]) -> None:
        """All replicas that there are now, with what they told of themselves. Those that are gone are forgotten."""
        for name in self._reports.keys() - reports.keys():
            self.remove(name)
        for name, stats in reports.items():
            report = parse_report(dict(stats))
            if report != self._reports.get(name):
                self._reports[name], self._loads[name] = report, report.load(self._own_tokens(name))
                self._follow(name, report)
        # In the router's order: then `rank` need not look them up one by one.
        self._loads = {name: self._loads[name] for name in reports}

    def remove(self, name: str) -> None:
        """This replica is gone."""
        self._reports.pop(name, None)
        self._loads.pop(name, None)
        self._peaks.pop(name, None)
        self._stop_following(name)
        self.rule.remove(name)

    def rank(self, request: RoutedRequest, names: Sequence[str], last: Sequence[str], first: str | None) -> list[str]:
        """The best first; those named in `last` after all others, and before them `first`."""
        loads = self._loads
        if list(loads) != list(names):
            loads = {name: loads.get(name, _UNKNOWN) for name in names}
        ranked = self.rule.rank(request, loads, self._clock.now())
        if not last and first is None:
            return ranked
        return sorted(ranked, key=lambda name: (name in last, name != first))

    def record_routed(self, request_id: str, request: RoutedRequest, name: str) -> None:
        """The replica has taken the request."""
        if len(self._open) < _MAX_OPEN:
            self._open[request_id, name] = request
            self.rule.record_routed(request, name, self._clock.now())
            before, since = self._peaks.get(name, (0, 0))
            self._peaks[name] = before, max(since, self.rule.pending_tokens(name))

    def record_prefilled(self, request_id: str, name: str) -> None:
        """Its first token has come."""
        request = self._open.get((request_id, name))
        if request is not None:
            self.rule.record_prefilled(request, name)

    def record_finished(self, request_id: str, name: str) -> None:
        """It has ended, in whatever way."""
        request = self._open.pop((request_id, name), None)
        if request is not None:
            self.rule.record_finished(request, name)

    def _own_tokens(self, name: str) -> int:
        """The most that this router itself had to prefill there, at any time that a report of now may tell of: the time
        since the one before, and that since the one before it. What a replica reports beyond it is other routers'."""
        before, since = self._peaks.get(name, (0, 0))
        self._peaks[name] = since, self.rule.pending_tokens(name)
        return max(before, since)

    def _connect(self, name: str, report: ReplicaReport) -> Subscriber:
        assert report.events_endpoint is not None
        return KvEventSubscriber(
            name, self.rule.index, report.events_endpoint, report.replay_endpoint, report.topic, self._clock
        )

    def _follow(self, name: str, report: ReplicaReport) -> None:
        """Have the index follow the replica's events, if it publishes any."""
        source = (report.events_endpoint, report.replay_endpoint, report.topic)
        if name in self._following:
            old = self._following[name][0]
            if (old.events_endpoint, old.replay_endpoint, old.topic) == source:
                return
            self._stop_following(name)
        if report.events_endpoint is None:
            return
        try:
            subscriber = self._subscribe(name, report)
        except ConfigError as error:
            logger.warning("replica %s is routed to by what was sent there alone: %s", name, error)
            return
        logger.info("following the KV events of replica %s at %s", name, report.events_endpoint)
        self._following[name] = report, asyncio.create_task(_run(name, subscriber))

    def _stop_following(self, name: str) -> None:
        if name in self._following:
            self._following.pop(name)[1].cancel()


async def _run(name: str, subscriber: Subscriber) -> None:
    """Until cancelled, or until a bug ends it."""
    try:
        await subscriber.run()
    except Exception:
        logger.exception("a bug in following the KV events of replica %s", name)
    finally:
        subscriber.close()
