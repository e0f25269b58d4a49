"""Prometheus metrics of the proxy, all under `cairn_proxy:`. The registry belongs to this object."""

from collections.abc import Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cairn.proxy.hints import Hints
from cairn.proxy.pool import Pool

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)


class ProxyMetrics:
    """What is counted and timed. The label values of each are in docs/proxy.md."""

    def __init__(self, pools: Sequence[Pool], hints: Hints) -> None:
        self._registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests by how they ended.", "outcome")
        self.decode_only = self._counter("decode_only", "Requests answered without a hand-over, by why.", "reason")
        self.retries = self._counter("retries", "Requests sent to one more server of a pool.", "pool")
        self.failures = self._counter(
            "upstream_failures", "Failed calls to a server, by why.", "pool", "server", "kind"
        )
        self.hints_stored = self._counter("hints_stored", "Second-turn hints remembered.")
        self.hints_sent = self._counter("hints_sent", "Second-turn hints sent to a prefill server.")
        self.prefill_seconds = self._histogram("prefill_seconds", "Time of successful prefill calls.")
        self.first_byte_seconds = self._histogram("first_byte_seconds", "Time from a request to its first byte.")
        self.request_seconds = self._histogram("request_seconds", "Time from a request to its last byte.")
        self._gauge("hints", "Second-turn hints that are remembered.").set_function(lambda: len(hints))
        up = self._gauge("upstream_up", "1 when a server is up, else 0.", "pool", "server")
        opened = self._gauge("upstream_open", "Requests that a server has open.", "pool", "server")
        for pool in pools:
            for url, upstream in pool.upstreams.items():
                up.labels(pool.name, url).set_function(partial(getattr, upstream, "up"))
                opened.labels(pool.name, url).set_function(partial(getattr, upstream, "num_open"))

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"cairn_proxy:{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"cairn_proxy:{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"cairn_proxy:{name}", text, registry=self._registry, buckets=_SECONDS)
