"""When somebody should look: the alerts as a table, and the numbers that they compare with."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from string import Template
from typing import TYPE_CHECKING

from clip_deploy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Threshold:
    """A number that alerts compare with, and that panels draw."""

    default: float
    meaning: str


THRESHOLDS = {
    "failed_share": Threshold(0.01, "of all requests, how many may fail"),
    "refused_share": Threshold(0.01, "of all requests, how many may be turned away"),
    "queue_ms": Threshold(100, "how long a request may wait in Triton's queue, on average"),
    "pending_requests": Threshold(256, "how many requests may wait in Triton's queue"),
    "batch_rows": Threshold(1.5, "how many rows an execution must have when requests wait"),
    "p99_ms": Threshold(1000, "what 99 of 100 requests to the gateway may take"),
    "memory_share": Threshold(0.95, "of the memory of the machine and of each GPU, how much may be used"),
    "gpu_busy_share": Threshold(0.95, "of the time, how much a GPU may be busy"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Alert:
    """One row.

    Args:
        name: in Prometheus's way of writing.
        part: ``triton``, ``gateway`` or ``gpu``: rendered where there is such a thing.
        severity: ``critical``: users notice now; ``warning``: they will.
        lasting: how long it must be so.
        expression: PromQL; ``$name`` stands for a threshold.
        summary: one line; may use Prometheus's own ``{{ $labels.x }}``.
        meaning: what it says about the deployment.
        remedy: what to do.
    """

    name: str
    part: str
    severity: str
    lasting: str
    expression: str
    summary: str
    meaning: str
    remedy: str


_MODEL = "sum by (instance, model)"
_FAILED = 'rate(nv_inference_request_failure{reason!~"REJECTED|CANCELED"}[5m])'
_REJECTED = 'rate(nv_inference_request_failure{reason="REJECTED"}[5m])'
_ALL = f"{_MODEL} (rate(nv_inference_request_success[5m])) + {_MODEL} (rate(nv_inference_request_failure[5m]))"
_QUEUE_MS = (
    f"{_MODEL} (rate(nv_inference_queue_duration_us[5m]))"
    f" / {_MODEL} (rate(nv_inference_request_success[5m])) / 1000"
)
_ROWS = f"{_MODEL} (rate(nv_inference_count[5m])) / {_MODEL} (rate(nv_inference_exec_count[5m]))"
# Health checks and scrapes are no users.
_USERS = 'route=~"/api/.*|/v1/.*"'
_ASKED, _FAULTY, _TURNED_AWAY = (
    f"sum by (instance) (rate(clip_gateway_requests_total{{{labels}}}[5m]))"
    for labels in (_USERS, f'{_USERS}, status=~"50[024]"', f'{_USERS}, status="503"')
)

ALERTS = (
    Alert(
        "TritonDown",
        "triton",
        "critical",
        "1m",
        'up{job="triton"} == 0',
        "Triton at {{ $labels.instance }} does not answer",
        "No model is served. The container ended, is loading, or hangs.",
        "`docker compose ps` and `docker compose logs triton`; docs/errors.md has the known lines of its log. A "
        "container that ends again and again has a model that does not load: go back to the version before.",
    ),
    Alert(
        "TritonRequestsFail",
        "triton",
        "critical",
        "2m",
        f"{_MODEL} ({_FAILED}) / ({_ALL}) > $failed_share",
        "{{ $value | humanizePercentage }} of the requests to {{ $labels.model }} fail",
        "The model gets requests and answers with errors: inputs of another shape than it has, or a backend that "
        "fails. Requests that the queue rejects, or that callers cancel, do not count here.",
        "`clip-deploy smoke-test --url HOST:8001` says whether the model is at fault; if it passes, a caller sends "
        "something else than the model's inputs.",
    ),
    Alert(
        "TritonQueueRejects",
        "triton",
        "critical",
        "2m",
        f"{_MODEL} ({_REJECTED}) / ({_ALL}) > $refused_share",
        "{{ $labels.model }} turns {{ $value | humanizePercentage }} of its requests away",
        "The queue is as long as `max_queue_size` allows, or requests waited longer than their timeout: more is asked "
        "than the server computes.",
        "More servers, or a faster one: `clip-deploy capacity` says how many. `clip-deploy tune` finds out whether "
        "other settings are enough.",
    ),
    Alert(
        "TritonQueueLong",
        "triton",
        "warning",
        "5m",
        f"{_QUEUE_MS} > $queue_ms",
        "Requests to {{ $labels.model }} wait {{ $value | humanize }} ms on average",
        "Requests come faster than they are computed, or the queue delay of the config is that long by itself.",
        "As for TritonQueueRejects; and compare with `max_queue_delay_microseconds` in the model's config.pbtxt.",
    ),
    Alert(
        "TritonPendingPilesUp",
        "triton",
        "warning",
        "2m",
        f"{_MODEL} (nv_inference_pending_request_count) > $pending_requests",
        "{{ $value }} requests wait for {{ $labels.model }}",
        "A burst that is not worked off, or a model that has stopped: then the compute time in the dashboard is nil.",
        "If nothing is computed any more: `docker compose restart triton`, and keep its log. Else as for "
        "TritonQueueRejects. `render-config --max-queue-size` bounds how many may wait.",
    ),
    Alert(
        "TritonBatchesDoNotForm",
        "triton",
        "warning",
        "10m",
        f"({_ROWS}) < $batch_rows and ({_QUEUE_MS}) > $queue_ms",
        "{{ $labels.model }} computes {{ $value | humanize }} rows at a time while requests wait",
        "Dynamic batching does not work: it is off, the delay is 0, or the model was rendered with `--max-batch 1`.",
        "`clip-deploy smoke-test --url HOST:8001` proves whether batches form; look at `dynamic_batching` and "
        "`max_batch_size` in config.pbtxt. If the model must not be batched, silence this alert for it.",
    ),
    Alert(
        "HostMemoryFull",
        "triton",
        "warning",
        "5m",
        "nv_cpu_memory_used_bytes / nv_cpu_memory_total_bytes > $memory_share",
        "The machine of {{ $labels.instance }} uses {{ $value | humanizePercentage }} of its memory",
        "The kernel will end a process soon, and Triton is the largest.",
        "Fewer instances (`render-config --instance-count`), fewer versions at once, or a larger machine.",
    ),
    Alert(
        "GpuMemoryFull",
        "gpu",
        "warning",
        "5m",
        "nv_gpu_memory_used_bytes / nv_gpu_memory_total_bytes > $memory_share",
        "GPU {{ $labels.gpu_uuid }} uses {{ $value | humanizePercentage }} of its memory",
        "The next load of a model, a new version beside the old one included, may fail.",
        "Fewer instances or a smaller `--max-batch`; see with `nvidia-smi` who else is on that GPU.",
    ),
    Alert(
        "GpuSaturated",
        "gpu",
        "warning",
        "15m",
        "avg_over_time(nv_gpu_utilization[5m]) > $gpu_busy_share",
        "GPU {{ $labels.gpu_uuid }} is busy {{ $value | humanizePercentage }} of the time",
        "There is no reserve: a little more load, and queues grow.",
        "`clip-deploy capacity` says how many servers the load needs; FP16 engines and `clip-deploy tune` raise what "
        "one carries.",
    ),
    Alert(
        "GatewayDown",
        "gateway",
        "critical",
        "1m",
        'up{job="gateway"} == 0',
        "The gateway at {{ $labels.instance }} does not answer",
        "Nobody can search. The container ended, or waits for Triton to be healthy.",
        "`docker compose ps` and `docker compose logs gateway`. It starts when Triton's models are ready, not before.",
    ),
    Alert(
        "GatewayNotReady",
        "gateway",
        "critical",
        "2m",
        "clip_gateway_ready == 0",
        "The gateway at {{ $labels.instance }} is up and not ready",
        "Triton does not serve both encoders of one export, or the index was made with another model.",
        "`curl http://127.0.0.1:8080/readyz` says which. Make the index again for the model that is served, or "
        "serve the model that it was made with.",
    ),
    Alert(
        "GatewayModelChanged",
        "gateway",
        "critical",
        "0m",
        'increase(clip_gateway_refused_total{reason="model-changed"}[5m]) > 0',
        "Triton serves other weights than the gateway at {{ $labels.instance }} began with",
        "Vectors of the new weights do not compare with those in the index, so the gateway refuses rather than "
        "answer wrongly.",
        "Go back to the old weights, or make the index again with the new ones; then `docker compose restart gateway`.",
    ),
    Alert(
        "GatewayFails",
        "gateway",
        "critical",
        "2m",
        f"{_FAULTY} / {_ASKED} > $failed_share",
        "{{ $value | humanizePercentage }} of the requests to {{ $labels.instance }} fail",
        "Triton answers wrongly or too late, or the gateway has a bug. The reasons are in the dashboard, one by one.",
        "docs/errors.md has each reason. A `bug` has its traceback in `docker compose logs gateway`.",
    ),
    Alert(
        "GatewayTurnsAway",
        "gateway",
        "warning",
        "5m",
        f"{_TURNED_AWAY} / {_ASKED} > $refused_share",
        "{{ $labels.instance }} turns {{ $value | humanizePercentage }} of its requests away",
        "More is asked than Triton answers, or Triton or the index is not there. Callers get 503 and Retry-After.",
        "The dashboard has the reasons. busy, with a short queue in Triton: `gateway --max-in-flight` is too "
        "small for it.",
    ),
    Alert(
        "GatewaySlow",
        "gateway",
        "warning",
        "5m",
        f"histogram_quantile(0.99, sum by (instance, le) (rate(clip_gateway_request_seconds_bucket{{{_USERS}}}[5m])))"
        " * 1000 > $p99_ms",
        "One request in a hundred to {{ $labels.instance }} takes over {{ $value | humanize }} ms",
        "The dashboard says with what: prepare (large pictures), embed (Triton) or search (the index).",
        "prepare: `gateway --decode fast`, or more cores. embed: as for TritonQueueLong. search: see to the index.",
    ),
)  # fmt: skip


def chosen(thresholds: Mapping[str, float]) -> dict[str, float]:
    """Every threshold, with the given ones in place of the defaults.

    Raises:
        ConfigError: there is no such threshold, or it is no number above nil.
    """
    for name, value in thresholds.items():
        if name not in THRESHOLDS:
            near = difflib.get_close_matches(name, THRESHOLDS, n=1) or list(THRESHOLDS)
            raise ConfigError(f"there is no threshold {name!r}", remedy=f"use {', '.join(near)}")
        if not (value > 0 and math.isfinite(value)):
            raise ConfigError(
                f"threshold {name} is {value:g}",
                remedy=f"give it a number above 0: {THRESHOLDS[name].meaning}",
            )
        if name.endswith("_share") and value >= 1:
            raise ConfigError(
                f"threshold {name} is {value:g}, which is never passed",
                remedy="give it a share, as 0.01",
            )
    return {name: row.default for name, row in THRESHOLDS.items()} | dict(thresholds)


def alerts_of(parts: set[str], thresholds: Mapping[str, float]) -> list[tuple[Alert, str]]:
    """The alerts of some parts of a deployment, each with its finished expression."""
    numbers = {name: f"{value:g}" for name, value in chosen(thresholds).items()}
    return [
        (alert, Template(alert.expression).substitute(numbers))
        for alert in ALERTS
        if alert.part in parts
    ]
