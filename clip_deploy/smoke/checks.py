"""The checks of the smoke test: one function each, listed at the end in the order in which they run."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from clip_deploy.artifacts import engine_digests, engine_precision
from clip_deploy.compare import agreement, norm_error, row_influence, spread, worst
from clip_deploy.contract import PREFIX
from clip_deploy.errors import ServerError, ServerTimeout, ServerUnavailable
from clip_deploy.files import digest_or_none
from clip_deploy.inputs.images import to_pixels
from clip_deploy.smoke import gpu
from clip_deploy.smoke.crowd import alone, send_crowd
from clip_deploy.smoke.outcome import outcome, skipped
from clip_deploy.spec import Tower

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from clip_deploy.smoke.outcome import Outcome
    from clip_deploy.smoke.subject import Subject, Target

# A first answer that takes this many times as long as later ones, and a second at least: warmup did not happen.
_FIRST_ANSWER_RATIO = 5.0
_FIRST_ANSWER_FLOOR_S = 1.0
_LATER_ANSWERS = 9
RUNS_ON_GPU = "it runs on the GPU"


def identity(subject: Subject) -> Outcome:
    """A port can answer although the server that was started is dead: somebody else's does."""
    server = subject.client.connection.server()
    figure = f"Triton {server.version}, id {server.name}"
    if subject.identity is None:
        return outcome(
            subject.client.connection.is_live(), figure, "", version=server.version, id=server.name
        )
    return outcome(
        server.name == subject.identity,
        figure,
        f"another server answers at {subject.client.connection.url}: stop it, or choose another port",
        version=server.version,
        id=server.name,
    )


def index(subject: Subject) -> Outcome:
    """The server's own readiness says nothing about models: ask for every version."""
    states = subject.client.connection.index()
    ready = sorted(name for name, state in states.items() if state == "READY")
    if subject.repository is None:
        missing = [
            t.name
            for t in subject.targets
            if not any(name.startswith(f"{t.name}:") for name in ready)
        ]
        return outcome(
            not missing,
            f"{len(ready)} ready: {', '.join(ready)}",
            f"load {', '.join(missing)}",
            index=states,
        )
    wanted = sorted(
        f"{m.name}:{version}" for m in subject.repository.models for version in m.served
    )
    if ready == wanted:
        return outcome(True, ", ".join(ready), "", index=states)
    lacking = [f"{name} is {states.get(name, 'absent')}" for name in wanted if name not in ready]
    strange = [f"{name} was not expected" for name in ready if name not in wanted]
    return outcome(
        False, "; ".join(lacking + strange), "serve this repository and no other", index=states
    )


def files(subject: Subject, target: Target) -> Outcome:
    if target.exported is None:
        return skipped("the repository is not at hand")
    exported = target.exported
    engine = engine_digests(exported.directory)
    elsewhere = {path.name for path in exported.graph_files} if engine else set()
    damaged = [name for name in exported.damaged_files() if name not in elsewhere]
    damaged += [n for n, sha in engine.items() if digest_or_none(exported.directory / n) != sha]
    figure = (
        f"graph {exported.graph.sha256[:12]}" if not damaged else f"changed: {', '.join(damaged)}"
    )
    return outcome(
        not damaged, figure, "render the model again", graph_sha256=target.exported.graph.sha256
    )


def descriptions(subject: Subject, target: Target) -> Outcome:
    """Metadata, which clients see, config, which the server runs, and manifest, which was checked, say the same."""
    contract, batch = target.served.contract, [] if target.served.max_batch == 0 else [-1]
    metadata = subject.client.connection.metadata(target.name, target.version)
    tensors = [(t.name, t.datatype, list(t.shape)) for t in (*metadata.inputs, *metadata.outputs)]
    unbatched = [] if batch else [-1]
    expected = [
        (t.name, t.dtype, batch + unbatched + list(t.shape))
        for t in (contract.input, contract.output)
    ]
    faults = [
        f"metadata says {got}, config {want}" for got, want in zip(tensors, expected) if got != want
    ]
    if len(tensors) != len(expected):
        faults.append(f"metadata has {len(tensors)} tensors")
    if target.exported is not None and target.exported.contract != contract:
        ours, theirs = target.exported.contract.to_parameters(), contract.to_parameters()
        keys = [key.removeprefix(PREFIX) for key in ours if ours[key] != theirs.get(key)]
        faults.append(f"config and manifest differ in {', '.join(keys) or 'their tensors'}")
    promised = engine_precision(target.exported) if target.exported else None
    if promised is not None and promised != target.served.precision.value:
        faults.append(
            f"config says {target.served.precision.value}, the engine was checked in {promised}"
        )
    against = (
        "metadata = config = manifest"
        if target.exported
        else "metadata = config (no manifest at hand)"
    )
    return outcome(not faults, "; ".join(faults) or against, "render the model again and reload it")


def first_answer(subject: Subject, target: Target) -> Outcome:
    """Runs before the other requests: what does the first user after a start wait for?"""
    row = target.inputs[:1]
    first = _seconds(subject, target, row)
    later = median(_seconds(subject, target, row) for _ in range(_LATER_ANSWERS))
    slow = first > max(_FIRST_ANSWER_FLOOR_S, _FIRST_ANSWER_RATIO * later)
    return outcome(
        not slow,
        f"first {first * 1000:.0f} ms, later {later * 1000:.0f} ms",
        "render it with --warmup, so that the server is not ready before the model is warm",
        first_s=first,
        later_s=later,
    )


def replay(subject: Subject, target: Target) -> Outcome:
    """The reference inputs through the server, against torch's answers."""
    if target.reference is None:
        return skipped("no reference at hand: name the repository too")
    expected = target.reference.outputs
    sizes = sorted({1, min(2, target.max_batch), target.max_batch})
    parts = []
    for size in sizes:
        rows = np.resize(np.arange(len(expected)), -(-len(expected) // size) * size).reshape(
            -1, size
        )
        parts += [agreement(subject.ask(target, target.inputs[r]), expected[r]) for r in rows]
    result = worst(parts)
    faults = result.faults(target.limits)
    figure = (
        "; ".join(faults) or f"{result}, {result.rows} rows at batches {', '.join(map(str, sizes))}"
    )
    remedy = "do not serve this model: find out whether pixels, tokens, graph or engine differ"
    return outcome(
        not faults,
        figure,
        remedy,
        min_cosine=result.min_cosine,
        max_error=result.max_error,
        batches=sizes,
    )


def unit_length(subject: Subject, target: Target) -> Outcome:
    answers = alone(subject, target)
    error, variety = norm_error(answers), spread(answers)
    holds = (
        bool(np.isfinite(answers).all())
        and error <= target.limits.norm
        and variety > target.limits.max_error
    )
    figure = (
        f"norms within {error:.0e} of 1, finite, {len(answers)} different rows"
        if holds
        else f"norm error {error:.1e}, spread {variety:.1e}"
    )
    return outcome(
        holds,
        figure,
        "export the model again; do not serve this one",
        norm_error=error,
        spread=variety,
    )


def independence(subject: Subject, target: Target) -> Outcome:
    """One row alone, in the middle of a full batch, and repeated. Needs no reference."""
    influence = row_influence(
        lambda rows: subject.ask(target, rows), target.inputs, target.max_batch
    )
    return outcome(
        influence <= target.limits.independence,
        f"one row changes by {influence:.1g}, alone or in a batch of {target.max_batch}",
        "the graph or the engine mixes rows of a batch: do not serve it",
        influence=influence,
    )


def crowd(subject: Subject, target: Target) -> Outcome:
    result = send_crowd(subject, target)
    n = subject.concurrency
    p50, p99 = (
        (float(np.percentile(result.seconds, q)) for q in (50, 99))
        if result.seconds
        else (0.0, 0.0)
    )
    figure = f"{result.right} of {n} right, p50 {p50 * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms"
    if result.errors:
        figure += f"; {len(result.errors)} errors, as: {result.errors[0]}"
    elif result.right < n:
        figure += f"; {n - result.right} wrong vectors"
    remedy = (
        "raise --max-queue-size or the timeout, or send fewer at once"
        if result.errors
        else "do not serve this model"
    )
    return outcome(
        result.right == n, figure, remedy, requests=n, right=result.right, p50_s=p50, p99_s=p99
    )


def batches(subject: Subject, target: Target) -> Outcome:
    """Single requests must leave in company: fewer executions than requests."""
    if target.served.max_batch < 2:
        return skipped("the model takes one row at a time")
    if subject.concurrency < 2:
        return skipped("only one request was sent")
    result = send_crowd(subject, target)
    formed = 0 < result.executions < result.inferences
    figure = f"{result.inferences} requests in {result.executions} batches; size×times: {_drawn(result.histogram)}"
    remedy = "raise --max-queue-delay, and see that dynamic_batching is in the model's config"
    histogram = {str(size): count for size, count in result.histogram.items()}
    return outcome(
        formed,
        figure,
        remedy,
        executions=result.executions,
        inferences=result.inferences,
        histogram=histogram,
    )


def refusals(subject: Subject, target: Target) -> Outcome:
    """A server that takes what the config forbids, or dies of it, is not one to put behind an API."""
    tensor = target.served.contract.input
    shape, dtype = (1, *tensor.shape), target.inputs.dtype
    wrong = {
        "a wrong shape": np.zeros((*shape[:-1], shape[-1] + 1), dtype),
        "a wrong dtype": np.zeros(shape, np.float64),
        "an oversized batch": np.resize(target.inputs, (target.max_batch + 1, *tensor.shape)),
    }
    if target.served.max_batch == 0:
        del wrong["an oversized batch"]  # such a model has no limit
    accepted = [what for what, rows in wrong.items() if not _is_refused(subject, target, rows)]
    alive = (
        agreement(subject.ask(target, target.inputs[:1]), alone(subject, target)[:1]).faults(
            target.limits
        )
        == []
    )
    figure = f"{len(wrong) - len(accepted)} of {len(wrong)} refused, still answering"
    if accepted or not alive:
        figure = f"accepted: {', '.join(accepted) or 'none'}; {'alive' if alive else 'no right answer afterwards'}"
    return outcome(
        not accepted and alive,
        figure,
        "render the model again: its config does not guard it",
        refused=sorted(wrong),
    )


def pictures(subject: Subject, target: Target) -> Outcome:
    """The user's own photographs: one request each, then all in batches; the same vectors, and no two alike."""
    if subject.pictures is None:
        return skipped("no --images given")
    preprocess = target.served.contract.preprocess
    assert preprocess is not None  # an image encoder's contract has it
    rows = to_pixels(subject.pictures.paths, preprocess)
    alone = np.concatenate([subject.ask(target, rows[i : i + 1]) for i in range(len(rows))])
    together = np.concatenate([subject.ask(target, part) for part in target.served.requests(rows)])
    faults = agreement(together, alone).faults(target.limits)
    if spread(alone) <= target.limits.max_error:
        faults.append("all have the same vector")
    return outcome(
        not faults,
        "; ".join(faults) or f"{len(rows)} pictures, each right",
        "look at these pictures",
        pictures=len(rows),
    )


def pairs(subject: Subject) -> Outcome:
    """Photographs find their captions, as often as torch says they should, or, for the user's own, mostly."""
    image, text = subject.target(Tower.IMAGE), subject.target(Tower.TEXT)
    if image is None or text is None:
        return skipped("it takes both encoders")
    if not image.served.contract.trained:
        return skipped("random weights find nothing")
    if subject.pictures is not None and any(subject.pictures.captions):
        return _own_pairs(subject, image, text)
    if image.reference is None or text.reference is None:
        return skipped("no reference at hand: name the repository too")
    captions = [caption for caption in image.reference.captions if caption]
    if len(captions) < 2:
        return skipped("the reference has no captions")
    photos = [i for i, caption in enumerate(image.reference.captions) if caption]
    sentences = [text.reference.labels.index(caption) for caption in captions]
    ours = _ranked_first(alone(subject, image)[photos], alone(subject, text)[sentences])
    torchs = _ranked_first(image.reference.outputs[photos], text.reference.outputs[sentences])
    right, expected = _own_place(ours), _own_place(torchs)
    figure = f"{right} of {len(ours)} photographs find their caption first (torch: {expected})"
    return outcome(
        bool((ours == torchs).all()),
        figure,
        "the towers do not belong together",
        right=right,
        torch=expected,
    )


def _own_pairs(subject: Subject, image: Target, text: Target) -> Outcome:
    assert subject.pictures is not None
    paths, captions = zip(
        *[(p, c) for p, c in zip(subject.pictures.paths, subject.pictures.captions) if c]
    )
    embeddings = subject.client.embed_images(paths), subject.client.embed_texts(captions)
    right = _own_place(_ranked_first(*embeddings))
    figure = f"{right} of {len(captions)} of your pictures find their caption first"
    remedy = "either the captions do not fit the pictures, or the towers do not belong together"
    return outcome(2 * right > len(captions), figure, remedy, right=right, pictures=len(captions))


def _ranked_first(images: NDArray[np.float32], texts: NDArray[np.float32]) -> NDArray[np.intp]:
    return np.asarray((images @ texts.T).argmax(axis=1))


def _own_place(first: NDArray[np.intp]) -> int:
    return int((first == np.arange(len(first))).sum())


def _drawn(histogram: dict[int, int]) -> str:
    """``1×2 8×3 32×2``: batch size × how often."""
    return ", ".join(f"{size}×{count}" for size, count in histogram.items()) or "no batches counted"


def _seconds(subject: Subject, target: Target, rows: NDArray[Any]) -> float:
    began = time.monotonic()
    subject.ask(target, rows)
    return time.monotonic() - began


def _is_refused(subject: Subject, target: Target, rows: NDArray[Any]) -> bool:
    try:
        subject.ask(target, rows)
    except (ServerUnavailable, ServerTimeout):
        raise
    except ServerError:
        return True
    return False


# What is checked, how, and of which towers.
ModelCheck = tuple[str, Any, Any]

SERVER_CHECKS = (
    ("the expected server answers", identity),
    ("exactly the expected models are ready", index),
)
MODEL_CHECKS: tuple[ModelCheck, ...] = (
    ("the files are as exported", files, Tower),
    ("all descriptions agree", descriptions, Tower),
    ("the first answer is not slow", first_answer, Tower),
    ("answers equal torch's", replay, Tower),
    ("vectors are finite, of length 1, distinct", unit_length, Tower),
    ("rows of a batch are independent", independence, Tower),
    ("a crowd is answered, each right", crowd, Tower),
    ("batches form", batches, Tower),
    ("wrong requests are refused", refusals, Tower),
    ("your pictures agree in batches", pictures, (Tower.IMAGE,)),
    (RUNS_ON_GPU, gpu.instances, Tower),
    ("the plan is the repository's", gpu.plan, Tower),
)
# Whether the answers are right, in a moment and without a crowd.
ANSWERS = tuple(row for row in MODEL_CHECKS if row[1] is replay)
CLOSING_CHECKS = (
    ("photographs find their captions", pairs),
    ("the GPU works", gpu.works),
)
