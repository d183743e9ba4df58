"""What is done with publications later: shown, gone back to, verified, and cleared away."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clip_deploy.errors import CheckFailed, ConfigError, PublishError
from clip_deploy.progress import Progress, silent
from clip_deploy.publishing.configs import current, kept, present, switch
from clip_deploy.publishing.locking import locked, remove_lock
from clip_deploy.publishing.publishing import Published, open_store
from clip_deploy.publishing.records import History, Publication, State
from clip_deploy.publishing.reloading import Fleet
from clip_deploy.publishing.uploading import missing

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from clip_deploy.publishing.stores import Store

# What can serve again.
_WHOLE = (State.COMPLETE, State.SERVED, State.WITHDRAWN)


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a destination holds. ``serving`` is the number whose configs are in place, None where none's are."""

    place: str
    publications: tuple[Publication, ...]
    serving: int | None

    def to_json(self) -> dict[str, Any]:
        return {
            "place": self.place,
            "serving": self.serving,
            "publications": [each.to_json() for each in self.publications],
        }


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was cleared away: publications by number, folders and files by key."""

    place: str
    publications: tuple[int, ...]
    removed: tuple[str, ...]
    freed_bytes: int

    def to_json(self) -> dict[str, Any]:
        return {
            "place": self.place,
            "publications": list(self.publications),
            "removed": list(self.removed),
            "freed_bytes": self.freed_bytes,
        }


def holdings(destination: str | Path | Store) -> Holdings:
    """Every publication of a destination, and which one serves."""
    store = open_store(destination)
    history = History.read(store)
    serves = current(store, history)
    return Holdings(store.place, history.publications, serves.number if serves else None)


def rollback(
    destination: str | Path | Store,
    *,
    to: int | None = None,
    reload: Sequence[str] = (),
    timeout_s: float = 300.0,
    progress: Progress = silent,
) -> Published:
    """Serve an earlier publication again: its configs are put in place, and nothing else is touched.

    Args:
        to: its number; None takes the newest one before that served and was not rolled back from.
        reload: gRPC addresses of running servers on that destination, which are switched one by one.

    Raises:
        PublishError: there is none, its files are gone, or it never served.
        ServerError: a server could not be switched; all serve what they served.
    """
    store = open_store(destination)
    History.read(store)
    with locked(store, "rollback") as lock:
        history = History.read(store)
        before = current(store, history)
        target = _target(history, before, to)
        _require_whole(store, target)
        texts = {model.name: kept(store, model) for model in target.models}
        there = present(store, set(texts))
        changed = {
            model.name: texts[model.name]
            for model in target.models
            if there.get(model.name) != model.config
        }
        with Fleet(reload, store, timeout_s=timeout_s, progress=progress) as fleet:
            lock.require_held()
            fleet.switch(target, changed, {}, replacing=lambda: switch(store, changed))
        if before is not None and before.number > target.number:
            before.now(store, State.WITHDRAWN)
        target = target.now(store, State.SERVED)
    return Published(
        store.place,
        target,
        before.number if before else None,
        tuple(changed),
        servers=tuple(reload),
    )


def prune(destination: str | Path | Store, *, keep: int, progress: Progress = silent) -> Pruned:
    """Clear away all but the newest publications, and what uploads that were cut have left.

    Args:
        keep: how many that can serve are kept; the one that serves now always is, and its number is never used again.

    Raises:
        PublishError: the destination is foreign, damaged or held by somebody else, or nothing of it serves.
    """
    if keep < 1:
        raise ConfigError(f"--keep {keep} keeps nothing", remedy="keep 1 or more")
    store = open_store(destination)
    History.read(store)
    with locked(store, "prune") as lock:
        history = History.read(store)
        serves = current(store, history)
        if serves is None and history.publications:
            raise PublishError(
                f"{store.place} is between two publications: which one serves cannot be told",
                remedy=f"publish again, or clip-deploy published rollback {store.place} --to N",
            )
        whole = [each for each in history.publications if each.state in _WHOLE]
        kept_ones = {each.number for each in whole[-keep:]}
        kept_ones |= {serves.number} if serves else set()
        # The greatest number stays, refused or not: a version's number means one version for ever.
        ended = [each for each in history.publications if each.state is not State.UPLOADING]
        kept_ones |= {ended[-1].number} if ended else set()
        goes = [each for each in history.publications if each.number not in kept_ones]
        stays = [each for each in history.publications if each.number in kept_ones]
        return _cleared(store, goes, stays, lock.require_held, progress)


def unlock(destination: str | Path | Store) -> str | None:
    """Remove a lock whose holder ended without a word; what it said, or None where there was none."""
    return remove_lock(open_store(destination))


def verify(
    destination: str | Path | Store, *, number: int | None = None, progress: Progress = silent
) -> int:
    """Read every published file back and hold it against its record; how many were right.

    Args:
        number: the publication to look at; all by default.

    Raises:
        CheckFailed: files are gone, or no longer what was published.
    """
    store = open_store(destination)
    history = History.read(store)
    chosen = [history.get(number)] if number is not None else list(history.publications)
    wanted: dict[str, str] = {}
    for each in chosen:
        if each.state is not State.UPLOADING:
            for model in each.models:
                wanted |= {key: stamp.sha256 for key, stamp in model.stamps()}
                wanted[model.config_copy] = model.config
    names = {key.split("/")[0] for key in wanted if "/" in key}
    there = {key for name in ("", *names) for key in store.files(name)}
    faults = []
    for key, sha256 in sorted(wanted.items()):
        progress(key)
        if key not in there:
            faults.append(f"{key} is gone")
        elif store.digest(key) != sha256:
            faults.append(f"{key} was changed")
    if faults:
        more = f", and {len(faults) - 1} more" if faults[1:] else ""
        raise CheckFailed(
            f"{store.place} does not hold what was published: {faults[0]}{more}",
            remedy="publish the model again from its repository; until then do not roll back to it",
        )
    return len(wanted)


def _target(history: History, before: Publication | None, to: int | None) -> Publication:
    """The publication to go back to."""
    place = history.place
    if to is not None:
        found = history.get(to)
        if found.state not in _WHOLE:
            why = f": {found.reason}" if found.reason else ", and never served"
            raise PublishError(
                f"publication {to} of {place} is {found.state.value}{why}",
                remedy="publish it again from its repository",
            )
        return found
    if before is None:
        raise PublishError(
            f"{place} is between two publications, or serves none: which one is meant cannot be told",
            remedy=f"name it: clip-deploy published rollback {place} --to N",
        )
    former = [
        each
        for each in history.publications
        if each.number < before.number and each.state is State.SERVED
    ]
    if not former:
        raise PublishError(
            f"{place} holds nothing that served before publication {before.number}",
            remedy=f"see clip-deploy published list {place}, and name one with --to N",
        )
    return former[-1]


def _require_whole(store: Store, target: Publication) -> None:
    """Raise PublishError where a publication could not serve, or not alone."""
    gone = [key for model in target.models for key in missing(store, model)]
    if gone:
        raise PublishError(
            f"publication {target.number} of {store.place} is no longer whole: {gone[0]} is gone or of another length",
            remedy="publish it again from its repository",
        )
    ours = {model.name for model in target.models}
    history = History.read(store)
    others = {model.name for each in history.publications for model in each.models} - ours
    if more := sorted(present(store, others)):
        raise PublishError(
            f"publication {target.number} of {store.place} has no {', '.join(more)}, which would go on serving another",
            remedy="go back to a publication that has all models, or publish them together again",
        )


def _cleared(
    store: Store,
    goes: list[Publication],
    stays: list[Publication],
    require_held: Any,
    progress: Progress,
) -> Pruned:
    """Remove what only ``goes`` needs; each record last, so that a cut leaves it to the next prune."""
    needed = {model.folder for each in stays for model in each.models}
    needed |= {model.config_copy for each in stays for model in each.models}
    needed |= {
        f"{model.name}/{name}"
        for each in stays
        for model in each.models
        for name in model.companions
    }
    removed: dict[str, int] = {}
    for each in goes:
        require_held()
        progress(f"publication {each.number}")
        for model in each.models:
            keys = [model.folder, model.config_copy]
            keys += [f"{model.name}/{name}" for name in model.companions]
            there = store.files(model.name) | store.files()
            for key in dict.fromkeys(keys):
                held = {k: n for k, n in there.items() if k == key or k.startswith(f"{key}/")}
                if key not in needed and key not in removed and held:
                    store.remove(key)
                    removed[key] = sum(held.values())
        store.remove(each.key)
    return Pruned(
        store.place,
        tuple(each.number for each in goes),
        tuple(removed),
        sum(removed.values()),
    )
