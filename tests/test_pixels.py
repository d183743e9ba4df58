"""Raw pixels: exported with ``--pixels uint8``, the graph normalises, a client never does it twice, the server agrees."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from clip_deploy.artifacts import ExportedModel, exported_models
from clip_deploy.cli import main
from clip_deploy.client import TritonInferenceClient
from clip_deploy.compare import Reference, cosine
from clip_deploy.engines import BACKENDS
from clip_deploy.errors import ConfigError, InputError, ServerError
from clip_deploy.inputs.photographs import photographs
from clip_deploy.repository import assemble, read
from clip_deploy.servers import LAUNCHERS, ServerOptions
from clip_deploy.spec import EncoderSpec, EngineSpec, Precision, ServingSpec, TensorSpec, Tower

from .conftest import SHARED
from .factories import CLIP_PREPROCESS, contract

TINY = str(Path(__file__).parent / "models" / "tiny-clip.json")


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> ExportedModel:
    from clip_deploy.export import export

    spec = EncoderSpec(TINY, "random", towers=(Tower.IMAGE,), max_batch=8, pixels="uint8")
    (model,) = export(spec, tmp_path_factory.mktemp("raw"))
    return model


def test_a_contract_that_does_not_say_who_normalises_is_refused():
    with pytest.raises(ConfigError, match="an input of UINT8 for float32 pixels"):
        contract(Tower.IMAGE, input=TensorSpec("pixel_values", "UINT8", (3, 224, 224)))


def test_unknown_pixels_are_refused(tmp_path: Path, capsys):
    assert (
        main(["export", TINY, "--pretrained", "random", "--pixels", "int4", "--out", str(tmp_path)])
        == 2
    )
    assert "pixels 'int4' are unknown" in capsys.readouterr().err


@pytest.mark.export
def test_a_graph_that_normalises_gives_the_embeddings_of_one_that_does_not(
    raw: ExportedModel, tiny_exports: dict[str, Path]
):
    plain = ExportedModel.read(tiny_exports["tiny-clip"] / Tower.IMAGE.model_name)
    ours, theirs = (
        Reference.read(m.directory / "reference.npz", Tower.IMAGE) for m in (raw, plain)
    )
    assert raw.contract.input.dtype == "UINT8"
    assert ours.inputs.dtype == np.uint8
    assert ours.inputs.nbytes * 4 == theirs.inputs.nbytes
    assert np.abs(ours.outputs - theirs.outputs).max() < 1e-5
    assert raw.contract.weights_sha256 == plain.contract.weights_sha256


@pytest.mark.export
def test_raw_pixels_survive_fp16_and_tensorrts_parser(tmp_path: Path):
    from clip_deploy.engines.tensorrt.checking import check
    from clip_deploy.export import export

    spec = EncoderSpec(TINY, "random", (Tower.IMAGE,), Precision.FP16, max_batch=4, pixels="uint8")
    (model,) = export(spec, tmp_path)
    assert model.contract.input.dtype == "UINT8"
    assert model.parity["min_cosine"] > 0.9999
    assert check(model, None).complaints == ()


@pytest.mark.server
@pytest.mark.export
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_a_server_that_reads_raw_pixels_is_asked_with_raw_pixels(
    raw: ExportedModel, tmp_path: Path, engine: str
):
    (model,) = exported_models([raw.directory])
    assemble(
        BACKENDS["python"].build(model, EngineSpec(engine)), ServingSpec(), tmp_path / "models"
    )
    reference = Reference.read(raw.directory / "reference.npz", Tower.IMAGE)
    pictures = photographs(None).paths
    with (
        LAUNCHERS["embedded"].start(read(tmp_path / "models"), ServerOptions()) as handle,
        TritonInferenceClient(handle.grpc) as client,
    ):
        assert cosine(client.embed_images(pictures), reference.outputs).min() > 0.999
        normalised = np.zeros((1, 3, *CLIP_PREPROCESS.size), np.float32)
        with pytest.raises(InputError, match="reads UINT8"):
            client.embed(Tower.IMAGE, normalised)
        with pytest.raises(ServerError, match="data-type is 'FP32'"):
            client.connection.infer(
                "clip_image_encoder", {"pixel_values": normalised}, "image_embeds"
            )
    assert main(["smoke-test", str(tmp_path / "models"), "--concurrency", "16"]) == 0


@pytest.mark.export
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared: a trained CLIP")
def test_fast_decoding_moves_no_embedding_of_a_trained_model(tmp_path: Path):
    from clip_deploy.export import export
    from clip_deploy.export.parity import session
    from clip_deploy.inputs.images import DECODES, to_pixels
    from tests.test_images import _mosaic

    trained = SHARED / "fixtures" / "tiny-clip"
    weights = str(trained / "tiny-clip.safetensors")
    spec = EncoderSpec(str(trained / "tiny-clip.json"), weights, towers=(Tower.IMAGE,), max_batch=4)
    (model,) = export(spec, tmp_path)
    encode, preprocess = session(model.graph_files[0]), model.contract.preprocess
    large = [_mosaic(*size) for size in ((4000, 3000), (3000, 4000), (1800, 1800), (1200, 1000))]
    exact, fast = (encode(to_pixels(large, preprocess, decode=how)) for how in DECODES)
    assert cosine(exact, fast).min() > 0.999
