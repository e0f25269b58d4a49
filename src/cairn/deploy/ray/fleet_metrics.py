"""`/metrics` of the fleet: what every replica tells of itself, each sample with the name of its replica."""

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cairn.errors import Overloaded
from cairn.http.error_responses import error_response

AskReplicas: TypeAlias = Callable[[], Awaitable[Mapping[str, str]]]
"""By the name of a replica, what it tells in Prometheus' text format. Those that fail are left out. Raises Overloaded
when they do not answer in time."""

_LABEL = "replica"
_PATH = "/metrics"


def merge_expositions(by_replica: Mapping[str, str]) -> str:
    """One exposition of several: a metric's samples together, as the format wants them, labelled by replica."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, exposition in by_replica.items():
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
        try:
            text = merge_expositions(await self._ask_replicas())
        except Overloaded as error:
            return await error_response(error, scope)(scope, receive, send)
        return await Response(text, media_type=CONTENT_TYPE_LATEST)(scope, receive, send)
