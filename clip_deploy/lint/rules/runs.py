"""CD95x: what shows only when the graph is run (``--run``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clip_deploy.lint.findings import Example, Hit, Severity, rule
from clip_deploy.lint.graph import Unreadable
from clip_deploy.lint.graph import read as read_graph
from clip_deploy.lint.running import RunFacts, run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from clip_deploy.lint.model import Model
    from clip_deploy.lint.target import Target
    from clip_deploy.lint.text import Place


@rule(
    "CD951",
    "batch-fails",
    Severity.ERROR,
    "The graph runs at batch 1 and fails beyond: the example it was traced with is frozen inside.",
    bad=Example(files={"1/model.onnx": "graph with a frozen batch"}),
    good=Example(files={"1/model.onnx": "graph"}),
    runs=True,
)
def batch_fails(model: Model, target: Target) -> Iterator[Hit]:
    for path, facts in _runs(model):
        for size, message in sorted(facts.failures.items()):
            yield Hit(
                f"the graph fails at batch {size}: {message}",
                model.place("max_batch_size"),
                file=_at(model, path),
            )
            break


@rule(
    "CD952",
    "batch-axis-lost",
    Severity.ERROR,
    "An output has fewer rows than went in: Triton cannot tell whose they are.",
    bad=Example(files={"1/model.onnx": "graph that loses the batch axis"}),
    good=Example(files={"1/model.onnx": "graph"}),
    runs=True,
)
def batch_axis_lost(model: Model, target: Target) -> Iterator[Hit]:
    if model.max_batch == 0:
        return
    for path, facts in _runs(model):
        for name in _listed_outputs(model, facts):
            wrong = [
                (size, shapes[name])
                for size, shapes in sorted(facts.shapes.items())
                if shapes[name][:1] != (size,)
            ]
            if wrong:
                size, shape = wrong[0]
                yield Hit(
                    f"{size} rows go in and {name} comes out as {list(shape)}",
                    _output(model, name),
                    file=_at(model, path),
                )


@rule(
    "CD953",
    "rows-depend",
    Severity.ERROR,
    "A row's answer depends on its neighbours in the batch, so it depends on who else asks at that moment.",
    bad=Example(files={"1/model.onnx": "graph whose rows mix"}),
    good=Example(files={"1/model.onnx": "graph"}),
    runs=True,
)
def rows_depend(model: Model, target: Target) -> Iterator[Hit]:
    for path, facts in _runs(model):
        for name, change in facts.influence.items():
            yield Hit(
                f"a row of {name} changes by {change:.0%} among others",
                _output(model, name),
                file=_at(model, path),
            )


@rule(
    "CD954",
    "shape-is-a-lie",
    Severity.ERROR,
    "An output comes out in another shape than the config and the graph declare.",
    bad=Example(files={"1/model.onnx": "graph that declares another shape"}),
    good=Example(files={"1/model.onnx": "graph"}),
    runs=True,
)
def shape_is_a_lie(model: Model, target: Target) -> Iterator[Hit]:
    skip = 1 if model.max_batch else 0
    for path, facts in _runs(model):
        shapes = facts.shapes.get(1, {})
        for tensor in model.config.output:
            dims = tuple(tensor.reshape.shape) if tensor.HasField("reshape") else tuple(tensor.dims)
            got = shapes.get(tensor.name)
            if got is None or got[:skip] != (1,) * skip:
                continue
            if len(got) - skip != len(dims) or any(
                d not in (-1, g) for d, g in zip(dims, got[skip:])
            ):
                message = (
                    f"{tensor.name} comes out as {list(got[skip:])}, the config says {list(dims)}"
                )
                yield Hit(message, _output(model, tensor.name), file=_at(model, path))


@rule(
    "CD955",
    "not-run",
    Severity.NOTE,
    "The graph could not be run on made-up data, so nothing is known of how it behaves.",
    bad=Example(files={"1/model.onnx": "graph that refuses small numbers"}),
    good=Example(files={"1/model.onnx": "graph"}),
    runs=True,
)
def not_run(model: Model, target: Target) -> Iterator[Hit]:
    for path, facts in _runs(model):
        if facts.refused:
            yield Hit(f"not run: {facts.refused}", file=path)


def _runs(model: Model) -> Iterator[tuple[Path, RunFacts]]:
    """The served graphs that can be read, with what running them showed."""
    for path in model.graph_files():
        try:
            graph = read_graph(path)
        except (OSError, Unreadable, ModuleNotFoundError):
            continue
        if all((path.parent / each.location).is_file() for each in graph.external):
            yield path, run(model, path)


def _listed_outputs(model: Model, facts: RunFacts) -> list[str]:
    """Outputs that the config serves; all of the graph's where it lists none."""
    known = list(next(iter(facts.shapes.values()), {}))
    listed = [tensor.name for tensor in model.config.output]
    return [name for name in known if not listed or name in listed]


def _output(model: Model, name: str) -> Place | None:
    names = [tensor.name for tensor in model.config.output]
    return model.place("output", names.index(name)) if name in names else None


def _at(model: Model, path: Path) -> Path | None:
    """The graph's file, where the config has no line to point at."""
    return None if model.has_config else path
