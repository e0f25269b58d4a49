"""`/metrics` of the fleet: what every replica tells of itself, each sample with the name of its replica."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TypeAlias

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

AskReplicas: TypeAlias = Callable[[], Awaitable[Mapping[str, str | None]]]
"""By the name of a replica, its exposition in Prometheus' text format; None for one that has failed, or is late."""

_LABEL = "replica"
_PATH = "/metrics"
_UP = "cairn:replica_up"
_UP_HEAD = (f"# HELP {_UP} 1 when a replica has told its metrics in time, else 0.", f"# TYPE {_UP} gauge")

logger = logging.getLogger(__name__)


async def gather_expositions(calls: Sequence[Coroutine[None, None, tuple[str, str]]], seconds: float) -> dict[str, str]:
    """What comes within `seconds`. Each call returns a replica's name and its exposition, which are keys and values."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        done, late = await asyncio.wait(tasks, timeout=seconds) if tasks else (set(), set())
    finally:
        for task in tasks:  # of a scrape that has been given up, too
            task.cancel()
    if late:
        logger.warning("%d replicas have not told their metrics within %g s", len(late), seconds)
    for task in done:
        if (error := task.exception()) is not None:
            logger.warning("a replica has not told its metrics: %s", str(error).strip().partition("\n")[0])
    return dict(task.result() for task in done if task.exception() is None)


class ReplicaNames:
    """Remembers the names of a pool's replicas: only an answer says which replica it is from."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()

    def add_missing(self, expositions: Mapping[str, str], num_asked: int) -> dict[str, str | None]:
        """With None for replicas that were asked and have not answered. One that has never answered stays unknown."""
        missing = [name for name in self._names if name not in expositions][: max(0, num_asked - len(expositions))]
        self._names = (*expositions, *missing)
        return {**expositions, **dict.fromkeys(missing)}


def merge_expositions(by_replica: Mapping[str, str | None]) -> str:
    """One exposition of several: a metric's samples together, as the format wants them, labelled by replica;
    `cairn:replica_up` says which have one."""
    heads: dict[str, list[str]] = {_UP: list(_UP_HEAD)} if by_replica else {}
    samples = {_UP: [_labelled(f"{_UP} {float(text is not None)}", replica) for replica, text in by_replica.items()]}
    for replica, exposition in by_replica.items():
        if exposition is None:
            continue
        metric = ""
        for line in exposition.splitlines():
            if line.startswith("# "):
                metric = line.split(" ", 3)[2]
                head = heads.setdefault(metric, [])
                if line not in head:
                    head.append(line)
            elif line:
                samples.setdefault(metric, []).append(_labelled(line, replica))
    return "".join(f"{line}\n" for metric in heads for line in (*heads[metric], *samples.get(metric, ())))


def _labelled(sample: str, replica: str) -> str:
    name, labels, value = sample, "", ""
    if "{" in sample:
        name, _, rest = sample.partition("{")
        labels, _, value = rest.rpartition("}")
        labels = f",{labels}" if labels else ""
    else:
        name, _, value = sample.partition(" ")
        value = f" {value}"
    return f'{name}{{{_LABEL}="{replica}"{labels}}}{value}'


class FleetMetrics:
    """Answers GET /metrics; all else is `app`'s."""

    def __init__(self, app: ASGIApp, ask_replicas: AskReplicas) -> None:
        self._app = app
        self._ask_replicas = ask_replicas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET" or scope["path"] != _PATH:
            return await self._app(scope, receive, send)
        text = merge_expositions(await self._ask_replicas())
        return await Response(text, media_type=CONTENT_TYPE_LATEST)(scope, receive, send)
