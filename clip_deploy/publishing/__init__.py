"""A repository → a destination that servers read: complete before it is seen, and the way back when it is not right."""

from clip_deploy.publishing.keeping import (
    Holdings,
    Pruned,
    holdings,
    prune,
    rollback,
    unlock,
    verify,
)
from clip_deploy.publishing.publishing import Published, open_store, publish
from clip_deploy.publishing.records import Publication, PublishedModel, State

__all__ = [
    "Holdings",
    "Pruned",
    "Publication",
    "Published",
    "PublishedModel",
    "State",
    "holdings",
    "open_store",
    "prune",
    "publish",
    "rollback",
    "unlock",
    "verify",
]
