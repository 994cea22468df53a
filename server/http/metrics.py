"""Metrics of requests and runs in Prometheus' text format, and the middleware that counts requests."""

import time
from collections.abc import Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tuner.records import RunStatus

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
#: All other methods share one label: clients may send any word, and labels take memory.
METHODS: Final = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)


class Metrics:
    """The metrics of one application. Its own registry keeps several applications in one process apart."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        labels = ("route", "method")
        self._requests = Counter(
            "kitsune_http_requests", "Requests answered", (*labels, "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "kitsune_http_request_seconds",
            "Time to the first byte of an answer",
            labels,
            buckets=BUCKETS_S,
            registry=self._registry,
        )
        self._noted: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        self._runs = Gauge("kitsune_runs", "Runs in the database", ("status",), registry=self._registry)

    def note_request(self, route: str, method: str, status: int, seconds: float) -> None:
        method = method if method in METHODS else "other"
        key = route, method, status
        if key not in self._noted:  # finding them by their labels took 4 % of a look-up
            self._noted[key] = self._requests.labels(*key), self._seconds.labels(route, method)
        requests, times = self._noted[key]
        requests.inc()
        times.observe(seconds)

    def text(self, runs: Mapping[RunStatus, int]) -> bytes:
        for status in RunStatus:
            self._runs.labels(status.value).set(runs.get(status, 0))
        return generate_latest(self._registry)


class Counting:
    """Outermost ASGI middleware: also counts what the others refuse. No answer counts as status 500."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin = time.perf_counter()
        status, seconds = 500, 0.0

        async def noting(message: Message) -> None:
            nonlocal status, seconds
            if message["type"] == "http.response.start":
                status, seconds = message["status"], time.perf_counter() - begin
            await send(message)

        try:
            await self.app(scope, receive, noting)
        finally:
            route = getattr(scope.get("route"), "path_format", "none")
            self.metrics.note_request(route, scope["method"], status, seconds or time.perf_counter() - begin)
