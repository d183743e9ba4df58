"""The rules, by what they look at. Importing this package fills ``findings.RULES``."""

from clip_deploy.lint.rules import (
    backends,
    batching,
    contracts,
    ensembles,
    files,
    flows,
    graphs,
    instances,
    layout,
    plans,
    runs,
    sequences,
    suppressions,
    tensors,
    texts,
    warmup,
)

__all__ = [
    "backends",
    "batching",
    "contracts",
    "ensembles",
    "files",
    "flows",
    "graphs",
    "instances",
    "layout",
    "plans",
    "runs",
    "sequences",
    "suppressions",
    "tensors",
    "texts",
    "warmup",
]
