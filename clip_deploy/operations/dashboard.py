"""What somebody looks at: the dashboard's panels as a table, and Grafana's JSON of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clip_deploy.operations.alerts import chosen

if TYPE_CHECKING:
    from collections.abc import Mapping

_SOURCE = {"type": "prometheus", "uid": "${source}"}
_COLUMNS, _WIDTH, _HEIGHT = 24, 8, 8


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart: ``curves`` are a legend and PromQL each; ``threshold`` names the number that is drawn as a line."""

    title: str
    unit: str
    curves: tuple[tuple[str, str], ...]
    description: str
    threshold: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels of one subject; shown where the deployment has that part."""

    title: str
    part: str
    panels: tuple[Panel, ...]


def _rate(metric: str, labels: str = "") -> str:
    matchers = ", ".join(filter(None, ('model=~"$model"', labels)))
    return f"sum by (model) (rate({metric}{{{matchers}}}[$__rate_interval]))"


def _per_request_ms(metric: str) -> str:
    return f"{_rate(metric)} / {_rate('nv_inference_request_success')} / 1000"


def _gateway(metric: str, by: str, labels: str = "") -> str:
    return f"sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))"


def _quantile(share: float) -> str:
    buckets = _gateway(
        "clip_gateway_request_seconds_bucket", "route, le", 'route=~"/api/.*|/v1/.*"'
    )
    return f"histogram_quantile({share}, {buckets}) * 1000"


_STAGES = ("queue", "compute_input", "compute_infer", "compute_output")

ROWS = (
    Row("Triton", "triton", (
        Panel("Answers per second", "reqps", (("{{model}}", _rate("nv_inference_request_success")),),
              "Requests that were answered."),
        Panel("Failures per second", "reqps", (
            ("{{model}} {{reason}}",
             'sum by (model, reason) (rate(nv_inference_request_failure{model=~"$model"}[$__rate_interval]))'),),
              "REJECTED: the queue was full, or the request waited too long. BACKEND: the model failed. CANCELED: the "
              "caller went. OTHER: the request does not fit the model."),
        Panel("Pending requests", "short", (
            ("{{model}}", 'sum by (model) (nv_inference_pending_request_count{model=~"$model"})'),),
              "Requests that wait for a batch.", "pending_requests"),
        Panel("Queue time", "ms", (("{{model}}", _per_request_ms("nv_inference_queue_duration_us")),),
              "How long a request waits, on average. The config's queue delay is a part of it.", "queue_ms"),
        Panel("Batch size", "short", (
            ("{{model}} rows", f"{_rate('nv_inference_count')} / {_rate('nv_inference_exec_count')}"),
            ("{{model}} requests", f"{_rate('nv_inference_request_success')} / {_rate('nv_inference_exec_count')}")),
              "What is computed at a time: rows, and requests. 1 under load means that batches do not form.",
              "batch_rows"),
        Panel("Time of a request by stage", "ms",
              tuple((f"{{{{model}}}} {stage}", _per_request_ms(f"nv_inference_{stage}_duration_us"))
                    for stage in _STAGES),
              "On average. compute_infer is the model itself, of the whole batch that a request is in."),
    )),
    Row("Gateway", "gateway", (
        Panel("Requests per second", "reqps", (
            ("{{route}} {{status}}", _gateway("clip_gateway_requests_total", "route, status")),),
              "By route and status."),
        Panel("Latency", "ms", (("{{route}} p50", _quantile(0.5)), ("{{route}} p99", _quantile(0.99))),
              "From the head of a request to the end of its answer.", "p99_ms"),
        Panel("Time by stage", "ms", (
            ("{{stage}}",
             f"{_gateway('clip_gateway_stage_seconds_sum', 'stage')} /"
             f" {_gateway('clip_gateway_stage_seconds_count', 'stage')} * 1000"),),
              "On average. prepare: pictures and texts; embed: Triton; search: the index."),
        Panel("In flight", "short", (
            ("{{instance}} in flight", "clip_gateway_in_flight"), ("{{instance}} waiting", "clip_gateway_waiting")),
              "Requests that are worked on, and that wait for their turn."),
        Panel("Turned away per second", "reqps", (("{{reason}}", _gateway("clip_gateway_refused_total", "reason")),),
              "By reason; docs/errors.md has each."),
        Panel("Ready, and bytes in memory", "short", (
            ("{{instance}} ready", "clip_gateway_ready"),
            ("{{instance}} MiB of bodies", "clip_gateway_buffered_bytes / 1048576")),
              "Ready is 1 when Triton serves both encoders of one export, and the index is of the same model."),
    )),
    Row("GPU", "gpu", (
        Panel("GPU utilization", "percentunit", (("{{gpu_uuid}}", "nv_gpu_utilization"),),
              "How much of the time kernels ran.", "gpu_busy_share"),
        Panel("GPU memory", "percentunit", (
            ("{{gpu_uuid}}", "nv_gpu_memory_used_bytes / nv_gpu_memory_total_bytes"),),
              "Of all that the GPU has, by whomever.", "memory_share"),
        Panel("GPU power", "watt", (
            ("{{gpu_uuid}}", "nv_gpu_power_usage"), ("{{gpu_uuid}} limit", "nv_gpu_power_limit")),
              "At the limit, clocks fall and the model gets slower."),
    )),
    Row("Machine", "triton", (
        Panel("CPU", "percentunit", (("{{instance}}", "nv_cpu_utilization"),), "Of all cores."),
        Panel("Memory", "percentunit", (
            ("{{instance}}", "nv_cpu_memory_used_bytes / nv_cpu_memory_total_bytes"),),
              "Of the whole machine.", "memory_share"),
        Panel("Up", "short", (("{{job}} {{instance}}", "up"),), "1 when Prometheus could ask it."),
    )),
)  # fmt: skip


def dashboard(name: str, parts: set[str], thresholds: Mapping[str, float]) -> dict[str, Any]:
    """Grafana's model of a dashboard with the rows of some parts of a deployment."""
    numbers = chosen(thresholds)
    panels: list[dict[str, Any]] = []
    top = 0
    for row in (row for row in ROWS if row.part in parts):
        place = {"x": 0, "y": top, "w": _COLUMNS, "h": 1}
        panels.append({"type": "row", "title": row.title, "gridPos": place, "panels": []})
        top += 1
        for i, panel in enumerate(row.panels):
            x, y = i * _WIDTH % _COLUMNS, top + i * _WIDTH // _COLUMNS * _HEIGHT
            place = {"x": x, "y": y, "w": _WIDTH, "h": _HEIGHT}
            panels.append(_chart(panel, place, numbers.get(panel.threshold)))
        top += -(-len(row.panels) * _WIDTH // _COLUMNS) * _HEIGHT
    return {
        "uid": name,
        "title": name,
        "tags": ["clip-deploy", "triton"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_SOURCE_VARIABLE, _MODEL_VARIABLE]},
        "panels": [{"id": number} | panel for number, panel in enumerate(panels, 1)],
    }


def _chart(panel: Panel, place: dict[str, int], threshold: float | None) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "transparent", "value": None}]
    steps += [] if threshold is None else [{"color": "red", "value": threshold}]
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "custom": {"thresholdsStyle": {"mode": "off" if threshold is None else "dashed"}},
                "thresholds": {"mode": "absolute", "steps": steps},
            },
            "overrides": [],
        },
        "options": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list"}},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": _SOURCE,
                "expr": expression,
                "legendFormat": legend,
            }
            for i, (legend, expression) in enumerate(panel.curves)
        ],
    }


_SOURCE_VARIABLE = {
    "name": "source",
    "label": "Prometheus",
    "type": "datasource",
    "query": "prometheus",
}
_MODEL_VARIABLE = {
    "name": "model",
    "label": "Model",
    "type": "query",
    "datasource": _SOURCE,
    "query": "label_values(nv_inference_request_success, model)",
    "refresh": 2,
    "multi": True,
    "includeAll": True,
    "allValue": ".*",
    "current": {"text": ["All"], "value": ["$__all"]},
}
