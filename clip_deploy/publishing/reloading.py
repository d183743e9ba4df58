"""Running servers taken to another version: tried beside the old one under a name of its own, then switched in turn.

Triton gives a request that names no version the greatest one that is loaded. A new version loaded under the model's own
name would therefore answer users before anybody has looked at it; so it is tried as another model.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from clip_deploy.artifacts import MANIFEST, REFERENCE
from clip_deploy.client import TritonInferenceClient
from clip_deploy.errors import (
    CheckFailed,
    ClipDeployError,
    ConfigError,
    PublishError,
    ServerError,
    ServerTimeout,
    ServerUnavailable,
)
from clip_deploy.publishing.configs import serving, switch, waiting
from clip_deploy.repository.assembly import CONFIG
from clip_deploy.repository.rendering import parse_config
from clip_deploy.smoke import hold
from clip_deploy.smoke.checks import ANSWERS, MODEL_CHECKS
from clip_deploy.smoke.subject import pinned
from clip_deploy.spec import Tower
from clip_deploy.triton_schema import as_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from clip_deploy.progress import Progress
    from clip_deploy.publishing.records import Publication, PublishedModel
    from clip_deploy.publishing.stores import Store
    from clip_deploy.smoke.subject import Target

_POLL_S = 0.2
# Asked for to see whether a server takes loads; underscores at both ends, so that nobody has one of that name.
_NO_MODEL = "_clip_deploy_asks_"
_TOWERS = {tower.model_name: tower for tower in Tower}


class Mode(Enum):
    """How a server comes to other models while it runs."""

    LOADS = "takes loads"
    POLLS = "polls"


@dataclass(frozen=True, slots=True)
class LiveServer:
    """One running server."""

    client: TritonInferenceClient
    mode: Mode
    timeout_s: float

    @classmethod
    def at(cls, client: TritonInferenceClient, timeout_s: float) -> LiveServer:
        """The server behind a client; its mode is what it answers to a load of a model that cannot be there.

        One that neither takes loads nor polls says the same as one that polls: that shows when it does not follow.

        Raises:
            ServerError: nobody answers.
        """
        try:
            client.connection.load(_NO_MODEL, timeout_s=timeout_s)
        except ServerError as error:
            if "load / unload is not allowed" in str(error):
                return cls(client, Mode.POLLS, timeout_s)
            if isinstance(error, (ServerUnavailable, ServerTimeout)):
                raise
        return cls(client, Mode.LOADS, timeout_s)

    @property
    def url(self) -> str:
        return self.client.connection.url

    def serve(self, name: str, version: int, text: bytes | None) -> None:
        """Have it serve one version of a model, as the destination says now, and wait until it does, alone.

        Args:
            text: its config; None where that did not change. It is sent along: by itself, Triton reads a config again
                only when the file bears another time, and takes back no config that it was once sent.

        Raises:
            ServerError: it refuses.
        """
        if self.mode is Mode.LOADS:
            config = as_json(parse_config(text.decode(), name)) if text else None
            self.client.connection.load(name, config, timeout_s=self.timeout_s)
        self._await(name, version)

    def drop(self, name: str) -> None:
        """Have it forget a model, and wait until its memory is free."""
        if self.mode is not Mode.LOADS:
            return
        self.client.connection.unload(name)
        deadline = time.monotonic() + self.timeout_s
        while time.monotonic() < deadline:
            states = self.client.connection.versions(name).values()
            if all(state == "UNAVAILABLE" for state, _ in states):
                return
            time.sleep(_POLL_S)

    def _await(self, name: str, version: int) -> None:
        connection, deadline = self.client.connection, time.monotonic() + self.timeout_s
        while True:
            states = connection.versions(name)
            ready = [number for number, (state, _) in states.items() if state == "READY"]
            if ready == [version]:
                return
            state, reason = states.get(version, ("", ""))
            if state == "UNAVAILABLE" and reason not in ("", "unloaded"):
                raise ServerError(
                    f"{self.url} refuses version {version} of {name}: {reason}",
                    remedy="see that server's log",
                )
            if time.monotonic() > deadline:
                raise ServerTimeout(
                    f"{self.url} does not serve version {version} of {name} after {self.timeout_s:g} s",
                    remedy="see that it serves this destination, and runs with --model-control-mode=explicit or poll; "
                    "give it longer with --timeout",
                )
            time.sleep(_POLL_S)


class Fleet:
    """The running servers of a destination; empty where none were named. A context manager.

    Args:
        urls: their gRPC addresses.
        store: what they serve from.
        timeout_s: how long one may take to load or to notice a version.
        concurrency: requests at once when a version is tried.
    """

    def __init__(
        self,
        urls: Sequence[str],
        store: Store,
        *,
        timeout_s: float,
        concurrency: int = 16,
        progress: Progress,
    ) -> None:
        self._store, self._progress, self._concurrency = store, progress, concurrency
        self._urls, self._timeout_s = tuple(dict.fromkeys(urls)), timeout_s
        self._stack = ExitStack()
        self._servers: list[LiveServer] = []

    def __enter__(self) -> Fleet:
        """Look at each server, before anything is changed.

        Raises:
            ServerError: one does not answer.
            ConfigError: some poll and some take loads; a copy to try on the latter would be loaded by the former.
        """
        try:
            for url in self._urls:
                client = self._stack.enter_context(TritonInferenceClient(url))
                self._servers.append(LiveServer.at(client, self._timeout_s))
            if len({server.mode for server in self._servers}) > 1:
                told = ", ".join(f"{each.url} {each.mode.value}" for each in self._servers)
                raise ConfigError(
                    f"the servers of one destination differ: {told}",
                    remedy="start all with --model-control-mode=explicit, or all with poll",
                )
        except BaseException:
            self._stack.close()
            raise
        return self

    @property
    def polls(self) -> bool:
        """Whether the servers find out by themselves, so that nothing can be tried on them beside what serves."""
        return any(server.mode is Mode.POLLS for server in self._servers)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def try_beside(
        self, publication: Publication, texts: Mapping[str, bytes], folders: Mapping[str, Path]
    ) -> None:
        """Load the new versions on each server under other names, and hold their answers against torch's.

        Polling servers are left alone: a copy that is taken away while one is loading it can stop its polling for good.

        Args:
            texts: the configs of the models that change.
            folders: where the models' versions, with their references, lie on this machine.

        Raises:
            ServerError: a server does not load one. Nothing is switched.
            CheckFailed: a server answers wrongly. Nothing is switched.
        """
        models = [m for m in publication.models if m.name in texts and m.name in folders]
        if not self._servers or self.polls or not models:
            return
        try:
            for model in models:
                self._place(model, texts[model.name].decode())
            for server in self._servers:
                self._try(server, models, folders)
        finally:
            for model in models:
                self._store.remove(_candidate(model.name))

    def switch(
        self,
        publication: Publication,
        texts: Mapping[str, bytes],
        folders: Mapping[str, Path],
        *,
        replacing: Callable[[], None],
    ) -> None:
        """Replace the configs at the destination and take each server to them, one after the other.

        Args:
            replacing: puts the configs in place.

        Raises:
            ServerError: a server did not follow; the configs and every server are back where they were.
            CheckFailed: a server's answers were wrong; the same.
        """
        before = {name: self._store.read(f"{name}/{CONFIG}") or b"" for name in texts}
        replacing()
        done: list[LiveServer] = []
        models = [model for model in publication.models if model.name in texts or not texts]
        try:
            for server in self._servers:
                done.append(server)
                self._progress(f"{server.url}: switching to publication {publication.number}")
                for model in models:
                    server.serve(model.name, model.version, texts.get(model.name))
                self._hold(server, models, folders)
        except BaseException as error:
            told = self._back(before, done)
            if not isinstance(error, ClipDeployError):
                raise
            raise type(error)(f"{error}; {told}", remedy=error.remedy) from error

    def _place(self, model: PublishedModel, text: str) -> None:
        """Copy a version inside the destination, to a model of another name; seen only when it is all there."""
        name = _candidate(model.name)
        self._store.remove(name)  # of a publisher that was killed
        self._store.write(f"{name}/{CONFIG}", waiting(name, model.backend).encode())
        for key, _ in model.stamps():
            self._store.copy(key, f"{name}/{key.partition('/')[2]}")
        self._store.write(f"{name}/{CONFIG}", serving(text, model.version, name=name).encode())

    def _try(
        self, server: LiveServer, models: list[PublishedModel], folders: Mapping[str, Path]
    ) -> None:
        try:
            for model in models:
                name = _candidate(model.name)
                self._progress(f"{server.url}: loading {name}, beside what serves")
                server.serve(name, model.version, None)
            targets = [
                target
                for model in models
                if (target := _target(server, model, folders[model.name], beside=True)) is not None
            ]
            report = hold(
                server.client,
                targets,
                MODEL_CHECKS,
                concurrency=self._concurrency,
                progress=lambda step: self._progress(f"{server.url}: {step}"),
            )
        finally:
            for model in models:
                with suppress(ServerError):  # what came before says more
                    server.drop(_candidate(model.name))
        if report.failed:
            first = report.failed[0]
            raise CheckFailed(
                f"{server.url} with the new version: {first.name}: {first.figure}; nothing was switched",
                remedy=first.remedy,
            )

    def _hold(
        self, server: LiveServer, models: list[PublishedModel], folders: Mapping[str, Path]
    ) -> None:
        """What users get now is what torch gave."""
        with tempfile.TemporaryDirectory(prefix="clip-deploy-") as place:
            targets = []
            for model in models:
                folder = folders.get(model.name) or self._fetched(model, Path(place) / model.name)
                targets.append(_target(server, model, folder, beside=False))
            checks = (
                MODEL_CHECKS if self.polls and folders else ANSWERS
            )  # the former were not tried
            report = hold(
                server.client,
                [target for target in targets if target is not None],
                checks,
                concurrency=self._concurrency,
            )
        if report.failed:
            first = report.failed[0]
            raise CheckFailed(
                f"{server.url} after the switch: {first.model}: {first.figure}",
                remedy=first.remedy,
            )

    def _fetched(self, model: PublishedModel, folder: Path) -> Path:
        """The files of a version that tell what it should answer."""
        folder.mkdir()
        for name in (MANIFEST, REFERENCE):
            if name in model.files:
                (folder / name).write_bytes(self._store.read(f"{model.folder}/{name}") or b"")
        return folder

    def _back(self, before: Mapping[str, bytes], done: list[LiveServer]) -> str:
        """Put everything back that can be, and say in words what became of it."""
        self._progress("going back")
        try:
            switch(self._store, {name: text for name, text in before.items() if text})
        except PublishError as error:
            return f"and the former configs could not be put back: {error}"
        stuck = []
        for server in done:
            try:
                for name, text in before.items():
                    _restore(server, name, text)
            except ClipDeployError as error:
                stuck.append(f"{server.url} did not go back: {error}")
        if stuck:
            return "; ".join(stuck)
        places = ", ".join(server.url for server in done)
        return f"the former version serves again at {places}"


def _restore(server: LiveServer, name: str, text: bytes) -> None:
    config = parse_config(text.decode(), name)
    (version,) = config.version_policy.specific.versions
    if text.decode() == waiting(name, config.backend):
        server.drop(name)  # nothing served before
    else:
        server.serve(name, version, text)


def _candidate(name: str) -> str:
    return f"{name}_candidate"


def _target(
    server: LiveServer, model: PublishedModel, folder: Path, *, beside: bool
) -> Target | None:
    """One of our encoders as a subject of the smoke test; None for other models, of which only loading is known."""
    tower = _TOWERS.get(model.name)
    if tower is None or not {MANIFEST, REFERENCE} <= set(model.files):
        return None
    name, version = (_candidate(model.name), str(model.version)) if beside else (model.name, "")
    return pinned(server.client, tower, folder, name=name, version=version)
