"""Which engine a place belongs to: one row each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clip_deploy.errors import ConfigError, extra

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from clip_deploy.indexes.port import Index, IndexIdentity


@dataclass(frozen=True, slots=True)
class Engine:
    """A row: the extra that brings the engine, how places of it are written, and what opens one."""

    name: str
    extra: str
    place: str
    schemes: tuple[str, ...]
    open: Callable[[str, IndexIdentity | None], Awaitable[Index]]


async def _open_lance(place: str, create: IndexIdentity | None) -> Index:
    from clip_deploy.indexes.lance import LanceIndex

    return await LanceIndex.open(place, create)


async def _open_elastic(place: str, create: IndexIdentity | None) -> Index:
    from clip_deploy.indexes.elastic import ElasticIndex

    return await ElasticIndex.open(place, create)


ENGINES = (
    Engine("lancedb", "index", "FOLDER", ("",), _open_lance),
    Engine(
        *("elasticsearch", "elasticsearch", "https://host:9200/NAME", ("https", "http")),
        _open_elastic,
    ),
)


async def open_index(place: str, *, create: IndexIdentity | None = None) -> Index:
    """Open an index, or make one.

    Args:
        place: a folder, for LanceDB, or ``https://host:9200/NAME``, for Elasticsearch.
        create: the model whose vectors are to be stored; the index is made if it is not there. None: it must exist.

    Raises:
        ConfigError: there is no index, or it holds vectors of another model.
        MissingDependency: the engine's extra is not installed.
        IndexDamaged: what is stored cannot be read.
    """
    scheme = place.partition("://")[0] if "://" in place else ""
    for engine in ENGINES:
        if scheme in engine.schemes:
            with extra(engine.extra):
                index = await engine.open(place, create)
            break
    else:
        raise ConfigError(
            f"{place!r} is no place for an index",
            remedy=f"use {' or '.join(engine.place for engine in ENGINES)}",
        )
    if create is not None:
        try:
            index.identity.require(create, place)
        except ConfigError:
            await index.close()
            raise
    return index
