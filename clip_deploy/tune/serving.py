"""A model on a running server, put to other settings through Triton's load API, and measured there."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clip_deploy.artifacts import ExportedModel
from clip_deploy.bench.machine import describe
from clip_deploy.bench.measuring import measure
from clip_deploy.bench.subject import bench_subject
from clip_deploy.client import TritonInferenceClient
from clip_deploy.errors import CheckFailed, ServerError, ServerUnavailable
from clip_deploy.files import digest
from clip_deploy.progress import Progress, silent
from clip_deploy.repository.assembly import CONFIG
from clip_deploy.smoke.subject import targets_of
from clip_deploy.triton_schema import as_json
from clip_deploy.tune.search import Unservable
from clip_deploy.tune.space import Settings, Space, Surroundings, fixed_knobs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from clip_deploy.artifacts import ModelRepository
    from clip_deploy.bench.figures import Load, Run
    from clip_deploy.servers import ServerHandle
    from clip_deploy.triton_schema import ModelConfig
    from clip_deploy.tune.trials import Goal


def server_arguments(model: str) -> tuple[str, ...]:
    """tritonserver's options for a server whose model may be loaded again with other settings.

    A load that failed keeps this Triton from ending for its whole exit timeout, 30 s by default.
    """
    return ("--model-control-mode=explicit", f"--load-model={model}", "--exit-timeout-secs=2")


@dataclass(slots=True)
class TunedModel:
    """One model of a server in explicit control mode; calling it with settings and a load measures them.

    Args:
        url: ``host:port`` of the server's gRPC endpoint.
        repository: the one that it serves, narrowed to this model.
        written: what its config.pbtxt says.
        handle: the server, where we started it.
        duration_s: how long each run is measured.
        warmup_s: how long the load lasts before that.
        seed: of an open loop's arrivals.
    """

    url: str
    repository: ModelRepository
    written: ModelConfig
    handle: ServerHandle | None
    duration_s: float
    warmup_s: float
    seed: int = 0
    progress: Progress = silent
    _served: Settings | None = field(default=None)

    @property
    def name(self) -> str:
        return self.repository.models[0].name

    @property
    def config_path(self) -> Path:
        return self.repository.path / self.name / CONFIG

    def __call__(self, settings: Settings, load: Load) -> Run:
        """Serve settings, hold the answers against the reference, and measure them under a load.

        Raises:
            Unservable: the server refuses them, or its answers with them are wrong, or never come.
            ServerError: the server is gone.
        """
        try:
            with TritonInferenceClient(self.url) as client:
                self.progress(f"loading {settings}")
                self._serve(client, settings)
                (target,) = targets_of(client, self.repository)
                pid = self.handle.process.pid if self.handle else None
                subject = bench_subject(client, target, pid=pid)
                return measure(
                    subject,
                    load,
                    duration_s=self.duration_s,
                    warmup_s=self.warmup_s,
                    seed=self.seed,
                    progress=self.progress,
                )
        except (ServerError, CheckFailed) as error:
            self._served = None
            self._require_alive()
            raise Unservable(str(error)) from error

    def space(self, goal: Goal) -> Space:
        """What is worth trying here: the server is taken to run on this machine."""
        return Space.around(
            Surroundings(
                default=self._default(),
                cores=len(os.sched_getaffinity(0)),
                at_once=goal.load.users,
                budget_us=goal.p99_s * 1e6,
                fixed=fixed_knobs(self.written),
            )
        )

    def identity(self, goal: Goal, space: Space) -> dict[str, Any]:
        """What two trials must have in common to be compared."""
        model, facts = self.repository.models[0], describe()
        exported = ExportedModel.read(self.repository.version_folder(model))
        return {
            "model": f"{model.name} {exported.graph.sha256[:16]}",
            "config": digest([self.config_path])[:16],
            "machine": f"{facts['CPU']}, {facts['cores']} cores",
            "load": str(goal.load),
            "p99_ms": goal.p99_s * 1e3,
            "seconds_per_trial": self.duration_s,
            "space": {name: list(values) for name, values in space.values.items()},
        }

    def _default(self) -> Settings:
        """What the server makes of config.pbtxt."""
        with TritonInferenceClient(self.url) as client:
            completed = client.connection.config(self.name)
        if (
            not self.written.instance_group
        ):  # Triton chose how many; from here on the config says so
            self.written.instance_group.MergeFrom(completed.instance_group)
        return Settings.of(completed)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Give the model its own config back at the end, however that comes; a server of ours ends anyway.

        Triton would keep an override if it were asked to load the model from its unchanged file.
        """
        try:
            yield
        finally:
            if self.handle is None:
                with TritonInferenceClient(self.url) as client:
                    client.connection.load(self.name, as_json(self.written))

    def _serve(self, client: TritonInferenceClient, settings: Settings) -> None:
        if self._served == settings:
            return
        client.connection.load(self.name, as_json(settings.written(self.written)))
        found = Settings.of(client.connection.config(self.name))
        if found != settings:
            raise Unservable(f"the server made of it: {found}")
        self._served = settings

    def _require_alive(self) -> None:
        if self.handle is not None:
            if self.handle.process.poll() is not None:
                raise self.handle.failure()
            return
        with TritonInferenceClient(self.url, timeout_s=5) as client:
            try:
                alive = client.connection.is_live()
            except ServerError:
                alive = False
        if not alive:
            raise ServerUnavailable(
                f"the server at {self.url} is gone", remedy="start it again, and see its log"
            )
