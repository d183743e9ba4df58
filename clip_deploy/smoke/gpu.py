"""Checks of a server with a GPU; elsewhere each says why it was not made."""

from __future__ import annotations

import re
import time
import urllib.request
from typing import TYPE_CHECKING

from clip_deploy.contract import PREFIX
from clip_deploy.errors import ServerUnavailable
from clip_deploy.files import digest
from clip_deploy.repository import read_config
from clip_deploy.smoke.crowd import send
from clip_deploy.smoke.outcome import outcome, skipped
from clip_deploy.triton_schema import model_config_pb2

if TYPE_CHECKING:
    from clip_deploy.smoke.outcome import Outcome
    from clip_deploy.smoke.subject import Subject, Target

_KIND_GPU = model_config_pb2.ModelInstanceGroup.KIND_GPU
_PLAN = "model.plan"
_UPDATE_S = 10.0
# By how much of one GPU.
_BUSIER = 0.02
_SAMPLE = re.compile(r"^(nv_gpu_[a-z_]+)\{[^}]*\} ([0-9.e+-]+)$", re.MULTILINE)


def instances(subject: Subject, target: Target) -> Outcome:
    """Every instance where the repository wants it: one that fell back to the CPU answers rightly, and far slower."""
    count, devices, strays = _on_gpu(subject, target)
    wanted = _wanted(subject, target)
    if not count and not wanted:
        return skipped("the server runs it on the CPU, as its config says")
    faults = [f"elsewhere: {', '.join(strays)}"] if strays else []
    if not devices:
        faults.append("no GPU is named")
    if wanted and wanted != {-1} and wanted != set(devices):
        faults.append(f"the repository wants GPU {', '.join(map(str, sorted(wanted)))}")
    figure = f"{count} on GPU {', '.join(map(str, devices)) or '?'}"
    return outcome(
        not faults,
        "; ".join([figure, *faults]),
        "render it with --instance-kind gpu, and see the server's log for why it is elsewhere",
        instances=count,
        gpus=devices,
    )


def _wanted(subject: Subject, target: Target) -> set[int]:
    """The GPUs that the repository's config names; {-1} for any; empty where it asks for none."""
    if subject.repository is None:
        return set()
    config = read_config(subject.repository.path / target.name)
    groups = [group for group in config.instance_group if group.kind == _KIND_GPU]
    named = {gpu for group in groups for gpu in group.gpus}
    return named or ({-1} if groups or config.backend == "tensorrt" else set())


def _on_gpu(subject: Subject, target: Target) -> tuple[int, list[int], list[str]]:
    """(instances on GPUs, those GPUs, names of instance groups elsewhere), from the server's own config."""
    config = subject.client.connection.config(target.name, target.version)
    groups = [group for group in config.instance_group if group.kind == _KIND_GPU]
    devices = sorted({gpu for group in groups for gpu in group.gpus})
    count = sum(group.count * max(len(group.gpus), 1) for group in groups)
    return count, devices, [g.name for g in config.instance_group if g.kind != _KIND_GPU]


def plan(subject: Subject, target: Target) -> Outcome:
    """The digest in the served config is that of the plan in the repository: nobody loads another engine unseen."""
    config = subject.client.connection.config(target.name, target.version)
    told = config.parameters[f"{PREFIX}plan_sha256"].string_value
    if not told:
        return skipped("it is no TensorRT plan")
    if subject.repository is None or target.exported is None:
        return skipped("the repository is not at hand")
    path = target.exported.directory / _PLAN
    found = digest([path]) if path.is_file() else "no plan"
    figure = f"plan {told[:12]}"
    return outcome(
        found == told,
        figure if found == told else f"served {told[:12]}, in the repository {found[:12]}",
        "reload the model",
        plan_sha256=told,
    )


def works(subject: Subject) -> Outcome:
    """The GPU is busier under load than before it; what it does at rest proves nothing."""
    if subject.metrics is None:
        return skipped("the metrics address is not known; name it with --metrics-url")
    idle = _samples(subject.metrics)
    if "nv_gpu_utilization" not in idle:
        return skipped("the server has no GPU metrics")
    busy, now, deadline = 0.0, idle, time.monotonic() + _UPDATE_S
    while busy <= _BUSIER and time.monotonic() < deadline:  # Triton reads the GPU every two seconds
        for target in subject.targets:
            send(subject, target)
        now = _samples(subject.metrics)
        busy = now.get("nv_gpu_utilization", 0.0) - idle["nv_gpu_utilization"]
    used = now.get("nv_gpu_memory_used_bytes", 0.0)
    count = sum(_on_gpu(subject, target)[0] for target in subject.targets)
    return outcome(
        busy > _BUSIER,
        f"{busy:+.0%} busier under load; {used / 2**30:.1f} GB of memory in use, {count} instances of ours",
        "the requests are answered elsewhere: look at the instance groups",
        busier=busy,
        memory_bytes=used,
        instances=count,
    )


def _samples(address: str) -> dict[str, float]:
    """GPU metrics, summed over the GPUs."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            text = answer.read().decode("utf-8", "replace")
    except OSError as error:
        raise ServerUnavailable(
            f"no metrics at {address}: {error}", remedy="start Triton with metrics"
        ) from error
    found: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        found[name] = found.get(name, 0.0) + float(value)
    return found
