"""config.pbtxt as the switch: it names the one version that serves, so whatever else lies there is not seen.

Replacing it is the only step of a publication that a server can notice. It is one rename in a folder, and one object in
object storage.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from clip_deploy.contract import PREFIX
from clip_deploy.errors import ConfigError, PublishError
from clip_deploy.repository.assembly import CONFIG
from clip_deploy.repository.rendering import parse_config
from clip_deploy.triton_schema import ModelConfig
from clip_deploy.tune.config import edited

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clip_deploy.publishing.records import History, Publication, PublishedModel
    from clip_deploy.publishing.stores import Store

# No version has this number; Triton reads it and loads nothing.
_NO_VERSION = 2**31 - 1


def serving(text: str, version: int, *, name: str | None = None, place: object = CONFIG) -> str:
    """A config that serves one version and no other, all else as it was written.

    Args:
        name: another name for the model, for a copy that is tried beside it.
    """
    wanted = ModelConfig()
    wanted.CopyFrom(parse_config(text, place))
    wanted.version_policy.Clear()
    wanted.version_policy.specific.versions.append(version)
    if name is not None:
        wanted.name = name
    return edited(text, wanted, place)


def waiting(name: str, backend: str) -> str:
    """The config of a model whose first version is still on its way: a polling server finds nothing to load.

    Without it, Triton would make up a config of its own for files that are half there, and serve them.
    """
    return (
        "# clip-deploy: the first version is on its way.\n"
        f'name: "{name}"\nbackend: "{backend}"\nmax_batch_size: 0\n'
        f"version_policy: {{ specific: {{ versions: [ {_NO_VERSION} ] }} }}\n"
    )


def weights_of(text: str, place: object = CONFIG) -> str:
    """The digest of the weights that a model tells its clients; empty where it tells none."""
    return str(parse_config(text, place).parameters[f"{PREFIX}weights_sha256"].string_value)


def sha256(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def present(store: Store, models: set[str]) -> dict[str, str]:
    """Model → digest of the config.pbtxt that is there; models without one are left out."""
    found = {name: store.read(f"{name}/{CONFIG}") for name in sorted(models)}
    return {name: sha256(text) for name, text in found.items() if text is not None}


def current(store: Store, history: History) -> Publication | None:
    """The publication that is served: all its configs are in place. None where it is none, or one half-switched."""
    names = {model.name for each in history.publications for model in each.models}
    there = present(store, names)
    matching = [
        each
        for each in history.publications
        if each.state.value != "uploading"
        and each.models
        and all(there.get(model.name) == model.config for model in each.models)
    ]
    served = [each for each in matching if each.state.value == "served"]
    return (served or matching)[-1] if matching else None


def require_known(store: Store, history: History, backends: dict[str, str]) -> None:
    """Raise PublishError where a model's config is not one that was published: somebody changed it by hand.

    ``backends`` are the models about to be published.
    """
    names = {model.name for each in history.publications for model in each.models} | set(backends)
    for name, digest in present(store, names).items():
        known = {
            model.config for each in history.publications if (model := each.model(name)) is not None
        }
        waits = {sha256(waiting(name, backend)) for backend in (backends.get(name, ""), "")}
        if digest not in known | waits:
            raise PublishError(
                f"{store.place}/{name}/{CONFIG} is not one that was published: it was changed by hand",
                remedy=f"look at it; clip-deploy published rollback {store.place} --to N puts a published one there",
            )


def switch(store: Store, texts: Mapping[str, bytes]) -> None:
    """Put configs in place, of all models or of none.

    Raises:
        PublishError: they could not be written.
    """
    if texts:
        store.replace({f"{name}/{CONFIG}": text for name, text in texts.items()})


def kept(store: Store, model: PublishedModel) -> bytes:
    """The config under which a published model serves, from where it is kept.

    Raises:
        PublishError: it is gone, or changed.
    """
    text = store.read(model.config_copy)
    if text is None or sha256(text) != model.config:
        state = "is gone" if text is None else "was changed"
        raise PublishError(
            f"{store.place}/{model.config_copy} {state}, and with it the way back",
            remedy="publish the model again from its repository",
        )
    return text


def require_one_set_of_weights(models: tuple[PublishedModel, ...]) -> None:
    """Raise ConfigError where encoders of different weights would answer side by side: their vectors do not compare."""
    told = {model.name: model.weights for model in models if model.weights}
    if len(set(told.values())) > 1:
        pairs = ", ".join(f"{name} {weights[:12]}" for name, weights in told.items())
        raise ConfigError(
            f"these encoders come from different weights: {pairs}",
            remedy="publish both towers of one model together",
        )
