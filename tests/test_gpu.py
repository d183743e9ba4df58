"""On a machine with a GPU and TensorRT: plans are built, agree with torch, and refuse what they should.

``make test-gpu`` runs this file in one command of under eight minutes; elsewhere it is skipped, visibly.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from clip_deploy.artifacts import ExportedModel
from clip_deploy.compare import Reference, agreement, row_influence
from clip_deploy.engines.tensorrt.building import BuildOptions, build, installed_version
from clip_deploy.errors import EngineError
from clip_deploy.releases import releases
from clip_deploy.spec import TOLERANCES, BatchProfile, EncoderSpec, Precision, Tower
from tests.conftest import HERE

pytestmark = [pytest.mark.gpu, pytest.mark.export]

TINY = str(HERE / "models" / "tiny-clip.json")
MODELS = {"tiny": TINY, "ViT-B-32": "ViT-B-32"}


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[ExportedModel]]:
    from clip_deploy.export import export

    out = tmp_path_factory.mktemp("exports")
    return {
        name: export(EncoderSpec(model, "random", precision=Precision.FP16), out / name)
        for name, model in MODELS.items()
    }


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache") / "timing.cache"


def _encode(path: Path, model: ExportedModel):
    """The plan through Polygraphy's runner, as a function from inputs to embeddings."""
    from polygraphy.backend.common import BytesFromPath
    from polygraphy.backend.trt import EngineFromBytes, TrtRunner

    contract = model.contract
    runner = TrtRunner(EngineFromBytes(BytesFromPath(str(path))))
    runner.activate()

    def encode(rows: np.ndarray) -> np.ndarray:
        answers = runner.infer({contract.input.name: np.ascontiguousarray(rows)})
        return np.array(answers[contract.output.name])

    return encode, runner


@pytest.mark.parametrize("tower", Tower)
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_agrees_with_torch_row_by_row(name: str, tower: Tower, exports, cache: Path):
    model = next(each for each in exports[name] if each.contract.tower is tower)
    plan = build(model, BuildOptions(BatchProfile(1, 8, 32), timing_cache=cache))
    assert plan.half_share is None or plan.half_share > 0.3
    assert plan.size_bytes < 1.5 * model.graph.size_bytes
    reference = Reference.read(model.directory / "reference.npz", tower)
    limits = TOLERANCES[Precision.FP16, tower]
    encode, runner = _encode(plan.path, model)
    try:
        for size in (1, 2, 3, 8, 32):
            rows = np.resize(np.arange(len(reference.inputs)), size)
            got = encode(reference.inputs[rows])
            assert agreement(got, reference.outputs[rows]).faults(limits) == []
        assert row_influence(encode, reference.inputs, 32) <= limits.independence
    finally:
        runner.deactivate()


def rows_alike(got: np.ndarray, expected: np.ndarray, cosine: float) -> bool:
    """Polygraphy's own comparison, row by row."""
    from polygraphy.comparator import CosineSimilarityCompareFunc, IterationResult

    compare = CosineSimilarityCompareFunc(cosine_similarity_threshold=cosine)
    names = [f"row {number}" for number in range(len(expected))]
    left, right = (IterationResult(dict(zip(names, rows))) for rows in (got, expected))
    return all(bool(result) for result in compare(left, right).values())


def test_polygraphys_own_comparison_finds_them_alike(exports, cache: Path):
    model = exports["tiny"][0]
    plan = build(model, BuildOptions(timing_cache=cache))
    tower = model.contract.tower
    reference = Reference.read(model.directory / "reference.npz", tower)
    encode, runner = _encode(plan.path, model)
    try:
        got = encode(reference.inputs[:8])
    finally:
        runner.deactivate()
    assert rows_alike(got, reference.outputs[:8], TOLERANCES[Precision.FP16, tower].cosine)


def test_a_timing_cache_makes_the_second_build_faster(exports, tmp_path: Path):
    model = next(m for m in exports["ViT-B-32"] if m.contract.tower is Tower.TEXT)
    options, seconds = BuildOptions(timing_cache=tmp_path / "timing.cache"), []
    for _ in range(2):
        start = time.monotonic()
        build(model, options)
        seconds.append(time.monotonic() - start)
    assert options.timing_cache.stat().st_size > 0
    assert seconds[1] < seconds[0]


@pytest.mark.parametrize(
    "options",
    [BuildOptions(version_compatible=True), BuildOptions(hardware="ampere+")],
    ids=["version-compatible", "ampere+"],
)
def test_compatible_plans_are_built_and_read_back(exports, options: BuildOptions):
    plan = build(exports["tiny"][0], options)
    assert plan.provenance["version_compatible"] == options.version_compatible


def test_a_release_with_another_tensorrt_is_refused(exports):
    here = installed_version()
    other = next(
        row.name
        for row in releases().values()
        if row.tensorrt and tuple(map(int, row.tensorrt.split(".")[:2])) != here[:2]
    )
    with pytest.raises(EngineError, match="carries TensorRT"):
        build(exports["tiny"][0], BuildOptions(release=other))
