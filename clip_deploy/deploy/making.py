"""The steps that make something: exports, networks, plans, the repository, the publication."""

from __future__ import annotations

import importlib
import json
from typing import TYPE_CHECKING, Any

from clip_deploy import repository as repositories
from clip_deploy.artifacts import ENGINE, MANIFEST
from clip_deploy.deploy.checking import server_target
from clip_deploy.engines import BACKENDS
from clip_deploy.engines.tensorrt import plan_folder
from clip_deploy.errors import ClipDeployError, ConfigError
from clip_deploy.repository.assembly import unchanged, versions_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from clip_deploy.artifacts import EngineBuild, ExportedModel
    from clip_deploy.deploy.job import Job


PUBLICATION = "publish.json"


def export(job: Job) -> str:
    """Export the towers; torch is imported here, and only where something has to be exported."""
    job.progress("importing torch and open_clip")
    from clip_deploy.export import export as run

    if job.force or _is_edited(job):
        for tower in job.deployment.encoder.towers:  # without its manifest a tower is made again
            (job.out / tower.model_name / MANIFEST).unlink(missing_ok=True)
    models = run(job.deployment.encoder, job.out, progress=job.progress, warn=job.warn)
    return "; ".join(f"{model.name} {_agreement(model)}" for model in models)


def _is_edited(job: Job) -> bool:
    """Whether an export is no longer what this pipeline left: its own manifest cannot tell when that was edited."""
    return "export" in job.state.records and job.state.whole("export", job.digests) is not None


def _agreement(model: ExportedModel) -> str:
    size = model.graph.size_bytes / 2**20
    return f"{size:,.0f} MB, cosine ≥ {model.parity['min_cosine']:.6f}"


def exported_files(job: Job) -> Iterator[Path]:
    for model in job.exports():
        yield model.directory / MANIFEST
        yield from (model.directory / name for name in model.files)


def built(job: Job) -> list[EngineBuild]:
    """The exports as the backend's files; engines that make files of their own make them here, where they must."""
    d = job.deployment
    return [BACKENDS[d.backend].build(model, d.engine, job.progress) for model in job.exports()]


def convert(job: Job) -> str:
    from clip_deploy.artifacts import engine_digests, read_manifest

    parts = []
    for build in built(job):
        folder = build.files[ENGINE].parent
        facts = read_manifest(folder / ENGINE, "")
        assert engine_digests(folder)  # its manifest names its files
        parts.append(f"{build.name} in {facts['precision']}")
    return ", ".join(parts)


def networks(job: Job) -> Iterator[Path]:
    """The files of OpenVINO's networks, as the repository takes them."""
    for model in job.exports():
        yield from sorted((model.directory / "openvino").rglob("*.*"))


def build_plans(job: Job) -> str:
    # The name is computed: both modules have a ``build`` of one shape.
    where = "container" if job.deployment.in_container else "building"
    build: Any = importlib.import_module(f"clip_deploy.engines.tensorrt.{where}").build
    plans = [build(model, job.deployment.plan, progress=job.progress) for model in job.exports()]
    return ", ".join(f"{plan.directory.parent.name} {plan.profile}" for plan in plans)


def plans(job: Job) -> Iterator[Path]:
    for model in job.exports():
        yield from (path for path in sorted(plan_folder(model).iterdir()) if path.is_file())


def render(job: Job) -> str:
    """Add a version of each model that changed; one that is there just so already stays as it is."""
    d = job.deployment
    builds = built(job)
    _require_no_strangers(job, {build.name for build in builds})
    # All are judged before anything is written.
    standing = [unchanged(b, d.serving, d.repository, templates=d.templates) for b in builds]
    told = []
    for build, model in zip(builds, standing):
        word = "unchanged"
        if model is None or job.force:
            job.progress(f"{build.name}: copying a new version")
            word = "new"
            model = repositories.assemble(build, d.serving, d.repository, templates=d.templates)
        told.append(f"{build.name} version {model.served[-1]} ({word})")
    return ", ".join(told)


def _require_no_strangers(job: Job, ours: set[str]) -> None:
    """A model that was rendered earlier would go on being served beside those of now, with other weights."""
    place = job.deployment.repository
    found = [path for path in place.iterdir() if path.is_dir()] if place.is_dir() else []
    for path in sorted(found):
        if path.name not in ours and not path.name.startswith(".") and versions_in(path):
            raise ConfigError(
                f"{path} would be served, too, and is no part of deployment {job.deployment.name}",
                remedy="remove that folder, or give the deployment a repository of its own",
            )


def publish(job: Job) -> str:
    """Publish to the destination; what is there already is found by its digests."""
    from clip_deploy.publishing import prune
    from clip_deploy.publishing import publish as run

    d = job.deployment
    assert d.publish is not None  # the step is skipped otherwise
    done = run(
        d.repository,
        d.publish.destination,
        reload=d.publish.reload,
        target=server_target(d.starts, d.server.release, "gpu" if d.wants_gpu else "auto"),
        timeout_s=d.server.timeout_s,
        progress=job.progress,
    )
    job.write_report(PUBLICATION, done.to_json())
    said = f"{done.place}: publication {done.publication.number}"
    said += "" if done.changed else ", which served already"
    if d.publish.keep is not None:
        gone = prune(d.publish.destination, keep=d.publish.keep, progress=job.progress)
        said += f"; removed {len(gone.publications)}" if gone.publications else ""
    return said


def _number(job: Job) -> int | None:
    """The number under which this deployment was published last; None where it was not, or the report is damaged."""
    try:
        number = json.loads(job.report(PUBLICATION).read_text("utf-8"))["number"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return number if isinstance(number, int) else None


def unpublished(job: Job) -> str | None:
    """Why the destination no longer has what was published last; None where it serves it."""
    from clip_deploy.publishing import holdings

    assert job.deployment.publish is not None  # the step is skipped otherwise
    serves, number = holdings(job.deployment.publish.destination).serving, _number(job)
    return None if serves == number else f"publication {number} does not serve there"


def rolled_back(job: Job, reads: Callable[[Job], dict[str, str]]) -> str | None:
    """Why the same is not published again: somebody went back from it, and nothing has changed since."""
    from clip_deploy.publishing import State, holdings

    record, number, publish = job.state.records.get("publish"), _number(job), job.deployment.publish
    if record is None or number is None or publish is None:
        return None
    try:
        if job.state.changed("publish", reads(job)) is not None:
            return None
    except ClipDeployError:
        return None  # there is no repository yet
    found = holdings(publish.destination)
    withdrawn = {each.number for each in found.publications if each.state is State.WITHDRAWN}
    if number not in withdrawn or found.serving == number:
        return None
    return (
        f"publication {number} was rolled back to {found.serving} there; --force publishes it again"
    )
