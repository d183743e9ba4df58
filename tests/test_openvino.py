"""OpenVINO: IRs that agree with torch or are not made, what is chosen and written down, and the real server around them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from clip_deploy.artifacts import ExportedModel, exported_models
from clip_deploy.cli import main
from clip_deploy.client import TritonInferenceClient
from clip_deploy.compare import Reference, cosine
from clip_deploy.engines import BACKENDS
from clip_deploy.errors import ConfigError, EngineError, ServerError
from clip_deploy.files import digest
from clip_deploy.repository import assemble, read
from clip_deploy.servers import LAUNCHERS, ServerOptions
from clip_deploy.spec import EngineSpec, Precision, ServingSpec, Tower

from .conftest import SHARED
from .factories import exported

TRAINED = SHARED / "fixtures" / "tiny-clip"


@pytest.fixture
def exports(tiny_exports: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the tiny CLIP's exports, to put IRs beside."""
    return shutil.copytree(tiny_exports["tiny-clip"], tmp_path / "build")


def _image(exports: Path) -> ExportedModel:
    return ExportedModel.read(exports / Tower.IMAGE.model_name)


@pytest.mark.parametrize(
    ("choices", "complaint"),
    [
        ({"precision": "fp8"}, "precision 'fp8' is unknown"),
        ({"precision": "int8"}, "--calibration-images go together"),
        ({"calibration_images": Path("photos")}, "--calibration-images go together"),
    ],
)
def test_contradictory_choices_are_refused(choices: dict, complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        EngineSpec(**choices)


@pytest.mark.parametrize(
    ("backend", "spec", "complaint"),
    [
        ("onnxruntime", EngineSpec(name="openvino"), "has no engine 'openvino'"),
        ("python", EngineSpec(name="tensorrt"), "has no engine 'tensorrt'"),
        (
            "python",
            EngineSpec(precision="bf16"),
            "precision bf16 for clip_image_encoder, whose graph is fp32",
        ),
    ],
)
def test_an_engine_that_a_backend_has_not_is_refused(tmp_path: Path, backend, spec, complaint):
    with pytest.raises(ConfigError, match=complaint):
        BACKENDS[backend].build(exported(tmp_path), spec)


def test_openvino_computes_in_bf16_by_itself_and_takes_no_half_graph(tmp_path: Path):
    half = exported(tmp_path, precision=Precision.FP16)
    with pytest.raises(ConfigError, match="is an fp16 graph"):
        BACKENDS["python"].build(half, EngineSpec(name="openvino"))


@pytest.mark.export
@pytest.mark.parametrize("precision", ["fp32", "auto"])
def test_an_ir_agrees_with_torch_and_says_what_it_computes_in(exports: Path, precision: str):
    asked = EngineSpec("openvino", precision)
    build = BACKENDS["python"].build(_image(exports), asked)
    manifest = json.loads(build.files["engine.json"].read_text())
    assert manifest["parity"]["min_cosine"] > 0.999
    assert build.parameters["clip_deploy.engine"] == "openvino"
    assert build.parameters["clip_deploy.engine_precision"] == manifest["precision"]
    assert (manifest["precision"], build.parameters["INFERENCE_PRECISION_HINT"]) in [
        ("fp32", "f32"),
        ("bf16", "bf16"),
    ]
    if precision == "fp32":
        assert manifest["precision"] == "fp32"
        assert manifest["parity"]["max_error"] < 1e-5


@pytest.mark.export
def test_an_ir_is_made_once_and_again_when_it_is_damaged(exports: Path):
    steps: list[str] = []
    build = BACKENDS["python"].build(_image(exports), EngineSpec("openvino"), steps.append)
    BACKENDS["python"].build(_image(exports), EngineSpec("openvino"), steps.append)
    assert steps[-1].endswith("unchanged")
    for name, damage in (("model.bin", b"x"), ("engine.json", b"{")):
        build.files[name].write_bytes(damage)
        BACKENDS["python"].build(_image(exports), EngineSpec("openvino"), steps.append)
        assert "comparing with torch" in steps[-1]


@pytest.mark.export
def test_an_ir_that_disagrees_with_torch_is_not_made(exports: Path):
    model = _image(exports)
    place = model.directory / "reference.npz"
    reference = Reference.read(place, Tower.IMAGE)
    Reference(reference.inputs, reference.outputs[::-1].copy(), reference.labels).save(
        place, Tower.IMAGE
    )
    files = {**model.files, "reference.npz": digest([place])}
    manifest = json.loads((model.directory / "manifest.json").read_text())
    (model.directory / "manifest.json").write_text(json.dumps({**manifest, "files": files}))
    with pytest.raises(EngineError, match="out of tolerance: cosine"):
        BACKENDS["python"].build(_image(exports), EngineSpec("openvino"))
    assert not list(model.directory.glob("openvino/*"))


@pytest.mark.export
def test_tritons_openvino_backend_cannot_be_kept_to_fp32(exports: Path):
    with pytest.raises(ConfigError, match="cannot be kept to FP32"):
        BACKENDS["openvino"].build(_image(exports), EngineSpec(precision="fp32"))


def _photographs(folder: Path, count: int) -> Path:
    """Pictures that differ, with captions."""
    from PIL import Image

    folder.mkdir()
    random = np.random.default_rng(0)
    for i in range(count):
        coarse = random.integers(0, 255, (6, 6, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((96, 96)).save(folder / f"{i:02}.png")
    words = ("red", "blue", "small", "old", "wooden", "quiet")
    captions = {
        f"{i:02}.png": f"a {words[i % 6]} {words[i // 6 % 6]} thing, number {i}"
        for i in range(count)
    }
    (folder / "captions.json").write_text(json.dumps(captions))
    return folder


@pytest.mark.export
def test_int8_needs_enough_to_calibrate_on_and_to_be_judged_by(exports: Path, tmp_path: Path):
    few = _photographs(tmp_path / "few", 8)
    with pytest.raises(ConfigError, match="8 photographs to calibrate INT8 on"):
        BACKENDS["python"].build(_image(exports), EngineSpec("openvino", "int8", few))
    text = ExportedModel.read(exports / Tower.TEXT.model_name)
    (few / "captions.json").unlink()
    with pytest.raises(ConfigError, match="0 different captions"):
        BACKENDS["python"].build(text, EngineSpec("openvino", "int8", few))


@pytest.mark.export
def test_int8_is_judged_on_pictures_that_it_was_not_calibrated_on(tmp_path: Path, capfd):
    from clip_deploy.export import export
    from clip_deploy.spec import EncoderSpec

    photographs = _photographs(tmp_path / "photographs", 36)
    config = str(Path(__file__).parent / "models" / "tiny-clip.json")
    image = (Tower.IMAGE,)
    spec = EncoderSpec(config, "random", towers=image, max_batch=8, images=photographs)
    (model,) = export(spec, tmp_path / "build")
    build = BACKENDS["python"].build(model, EngineSpec("openvino", "int8", photographs))
    manifest = json.loads(build.files["engine.json"].read_text())
    assert manifest["precision"] == build.parameters["clip_deploy.engine_precision"] == "int8"
    figures = manifest["calibration"]
    assert (figures["calibrated_on"], figures["held_back"]) == (27, 9)
    assert 0.99 <= figures["min_cosine"] < 1
    assert figures["ranks"]["image→image"] >= 0.95
    assert b"FakeQuantize" in build.files["model.xml"].read_bytes()
    assert capfd.readouterr().out == "", "NNCF's own talk is not a result"


@pytest.mark.export
@pytest.mark.skipif(not TRAINED.is_dir(), reason="needs ../shared: a trained CLIP")
def test_int8_of_a_trained_model_is_refused_where_its_vectors_go_wrong(tmp_path: Path):
    """Calibrated on drawings, and off on the photographs of the reference: 0.93, and 0.998 on the drawings held back."""
    from clip_deploy.export import export
    from clip_deploy.spec import EncoderSpec

    weights = str(TRAINED / "tiny-clip.safetensors")
    spec = EncoderSpec(str(TRAINED / "tiny-clip.json"), weights, towers=(Tower.IMAGE,), max_batch=8)
    asked = EngineSpec("openvino", "int8", TRAINED / "photos")
    (model,) = export(spec, tmp_path / "photographs")
    with pytest.raises(EngineError, match=r"int8 is out of tolerance: cosine 0\.9"):
        BACKENDS["python"].build(model, asked)


@pytest.mark.server
@pytest.mark.export
def test_a_real_triton_serves_openvino_as_it_was_checked(exports: Path, tmp_path: Path, capsys):
    repository = tmp_path / "models"
    options = ["--backend", "python", "--engine", "openvino", "--repository", str(repository)]
    assert main(["render-config", str(exports), *options]) == 0
    capsys.readouterr()
    assert main(["smoke-test", str(repository), "--concurrency", "24", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert " in openvino, max batch 8" in report["facts"]["clip_image_encoder"]
    batches = [check for check in report["checks"] if "batches form" in check["name"]]
    assert batches
    assert all(check["status"] == "passed" for check in batches)


@pytest.mark.server
@pytest.mark.export
def test_a_server_that_computes_otherwise_than_was_checked_does_not_load(
    exports: Path, tmp_path: Path, capsys
):
    for model in exported_models([exports]):
        asked = EngineSpec("openvino", "fp32")
        assemble(BACKENDS["python"].build(model, asked), ServingSpec(), tmp_path / "models")
    config = tmp_path / "models" / "clip_image_encoder" / "config.pbtxt"
    config.write_text(config.read_text().replace('"f32"', '"dynamic"'))
    assert main(["smoke-test", str(tmp_path / "models")]) == 6
    assert "'dynamic', not bf16 or f32" in capsys.readouterr().err


@pytest.mark.server
@pytest.mark.export
def test_a_token_id_beyond_the_vocabulary_gets_no_vector_and_its_neighbours_get_theirs(
    exports: Path, tmp_path: Path, capsys
):
    text = ExportedModel.read(exports / Tower.TEXT.model_name)
    assemble(
        BACKENDS["python"].build(text, EngineSpec("openvino")), ServingSpec(), tmp_path / "models"
    )
    reference = Reference.read(text.directory / "reference.npz", Tower.TEXT)
    with (
        LAUNCHERS["embedded"].start(read(tmp_path / "models"), ServerOptions()) as handle,
        TritonInferenceClient(handle.grpc) as client,
    ):
        for beyond in (1_000_000, -1):
            wrong = reference.inputs[:1].copy()
            wrong[0, 1] = beyond
            with pytest.raises(ServerError, match="a token id outside 0 to"):
                client.embed(Tower.TEXT, wrong)
        got = client.embed(Tower.TEXT, reference.inputs[:2])
        assert cosine(got, reference.outputs[:2]).min() > 0.999
    config = tmp_path / "models" / text.name / "config.pbtxt"
    said = config.read_text()
    other = {"bf16": "int8", "fp32": "bf16"}
    (now,) = [p for p in other if f'engine_precision" value {{ string_value: "{p}"' in said]
    config.write_text(
        said.replace(
            f'engine_precision" value {{ string_value: "{now}"',
            f'engine_precision" value {{ string_value: "{other[now]}"',
        )
    )
    capsys.readouterr()
    assert main(["smoke-test", str(tmp_path / "models"), "--concurrency", "8"]) == 7
    assert f"the engine was checked in {now}" in " ".join(capsys.readouterr().out.split())
