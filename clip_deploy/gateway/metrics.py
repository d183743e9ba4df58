"""What the gateway counts, for Prometheus; every label has a bounded set of values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from clip_deploy.gateway.problems import REASONS

if TYPE_CHECKING:
    from clip_deploy.gateway.journal import Exchange
    from clip_deploy.gateway.pressure import Gate

_METHODS = ("GET", "HEAD", "POST", "OPTIONS")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics:
    """The counters of one gateway, in a registry of its own."""

    def __init__(self, gate: Gate) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "clip_gateway_requests",
            "Requests by route, method and status.",
            ("route", "method", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "clip_gateway_request_seconds",
            "From the head of a request to the end of its answer.",
            ("route",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._stages = Histogram(
            "clip_gateway_stage_seconds",
            "What a request spent its time with: prepare, embed, search.",
            ("stage",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._refused = Counter(
            "clip_gateway_refused", "Requests refused, by reason.", ("reason",), registry=registry
        )
        self._received = Counter(
            "clip_gateway_received_bytes", "Bytes of bodies read.", registry=registry
        )
        self._sent = Counter("clip_gateway_sent_bytes", "Bytes of bodies sent.", registry=registry)
        for name, text, value in (
            ("in_flight", "Requests worked on now.", lambda: gate.in_flight),
            (
                "room",
                "Requests that may be worked on at once; fewer while Triton is late.",
                lambda: gate.room,
            ),
            ("waiting", "Requests that wait for their turn.", lambda: gate.waiting),
            ("buffered_bytes", "Bytes of bodies in memory.", lambda: gate.held_bytes),
        ):
            Gauge(f"clip_gateway_{name}", text, registry=registry).set_function(value)
        self.ready = Gauge(
            "clip_gateway_ready", "1 when the last look found it ready.", registry=registry
        )

    def observe(self, route: str, method: str, exchange: Exchange) -> None:
        """Count a request that has ended."""
        method = method if method in _METHODS else "other"
        self._requests.labels(route, method, str(exchange.status or REASONS["gone"][0])).inc()
        self._seconds.labels(route).observe(exchange.elapsed_ms() / 1000)
        for stage, spent_ms in exchange.stages_ms.items():
            self._stages.labels(stage).observe(spent_ms / 1000)
        if exchange.refused:
            self._refused.labels(exchange.refused).inc()
        self._received.inc(exchange.bytes_in)
        self._sent.inc(exchange.bytes_out)

    def text(self) -> bytes:
        """Everything, in Prometheus's own format."""
        return generate_latest(self._registry)
