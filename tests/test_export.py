"""OpenCLIP → ONNX on tiny random models and, where the fixture is present, a trained one."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clip_deploy.artifacts import ExportedModel, exported_models
from clip_deploy.cli import main
from clip_deploy.compare import Reference, agreement
from clip_deploy.errors import ConfigError, ExportError, MissingDependency
from clip_deploy.spec import EncoderSpec, Tower
from tests.conftest import HERE, SHARED

pytestmark = pytest.mark.export

TINY = str(HERE / "models" / "tiny-clip.json")
TRAINED = SHARED / "fixtures" / "tiny-clip"


def _export(spec: EncoderSpec, out: Path, notes: list[str] | None = None) -> list[ExportedModel]:
    from clip_deploy.export import export

    return export(spec, out, warn=(notes if notes is not None else []).append)


def _torch_model(name: str, seed: int = 0):
    import open_clip
    import torch

    open_clip.add_model_config(HERE / "models" / f"{name}.json")
    torch.manual_seed(seed)
    return open_clip.create_model(name).eval()


@pytest.mark.parametrize("name", ["tiny-clip", "tiny-sigmoid"])
def test_both_towers_equal_torch_on_inputs_never_seen(tiny_exports: dict[str, Path], name: str):
    """An independent comparison: the model built again, new inputs, ONNX Runtime with its own defaults."""
    import onnxruntime
    import torch

    model = _torch_model(name)
    random = np.random.default_rng(5)
    for exported in exported_models([tiny_exports[name]]):
        contract = exported.contract
        shape = (7, *contract.input.shape)
        if contract.tower is Tower.IMAGE:
            inputs = random.standard_normal(shape).astype(np.float32)
            expected = model.encode_image(torch.from_numpy(inputs), normalize=True)
        else:
            inputs = random.integers(0, 49408, shape).astype(np.int32)
            expected = model.encode_text(torch.from_numpy(inputs), normalize=True)
        session = onnxruntime.InferenceSession(str(exported.graph_files[0]))
        (got,) = session.run([contract.output.name], {contract.input.name: inputs})
        assert agreement(got, expected.detach().numpy()).min_cosine > 0.999999


def test_the_graph_is_what_old_servers_read(tiny_exports: dict[str, Path]):
    import onnx

    for exported in exported_models([tiny_exports["tiny-clip"]]):
        graph = onnx.load(exported.graph_files[0])
        (entry,), (exit_,) = graph.graph.input, graph.graph.output
        assert graph.ir_version <= 8
        assert [(o.domain, 17 <= o.version <= 22) for o in graph.opset_import] == [("", True)]
        assert entry.name == exported.contract.input.name
        assert exit_.name == exported.contract.output.name
        for tensor, spec in ((entry, exported.contract.input), (exit_, exported.contract.output)):
            batch, *rest = tensor.type.tensor_type.shape.dim
            assert batch.dim_param == "batch"
            assert [axis.dim_value for axis in rest] == list(spec.shape)
        assert entry.type.tensor_type.elem_type == (
            6 if exported.contract.tower is Tower.TEXT else 1
        )


def test_the_graph_says_nothing_about_the_machine_it_was_made_on(tiny_exports: dict[str, Path]):
    for exported in exported_models([tiny_exports["tiny-clip"]]):
        data = exported.graph_files[0].read_bytes()
        assert b"site-packages" not in data
        assert str(Path.home()).encode() not in data


def test_the_manifest_answers_every_question(tiny_exports: dict[str, Path]):
    image, text = exported_models([tiny_exports["tiny-sigmoid"]])
    assert image.contract.preprocess.size == (48, 48)
    assert text.contract.tokens.context_length == 24
    assert image.contract.scoring.kind == "sigmoid"
    assert image.contract.scoring.bias == -10
    assert image.contract.weights_sha256 == text.contract.weights_sha256
    assert image.contract.trained is False
    assert image.source["activation"] == "GELU"
    assert {"torch", "open_clip_torch", "onnx", "onnxruntime", "clip-deploy"} <= set(image.versions)
    assert image.parity["batches"] == [1, 2, 3, 8]
    for exported in (image, text):
        assert exported.damaged_files() == []
        assert exported.parity["min_cosine"] > 0.99999
        reference = Reference.read(exported.directory / "reference.npz", exported.contract.tower)
        assert reference.inputs.shape == (len(reference.labels), *exported.contract.input.shape)


def test_equal_inputs_give_equal_bytes_and_are_skipped(tmp_path: Path):
    spec = EncoderSpec(TINY, "random:3", max_batch=4)
    start = time.monotonic()
    first = _export(spec, tmp_path / "a")
    before, middle = [m.directory.stat().st_mtime_ns for m in first], time.monotonic()
    again = _export(spec, tmp_path / "a")
    assert time.monotonic() - middle < (middle - start) / 2
    assert [m.directory.stat().st_mtime_ns for m in again] == before
    elsewhere = _export(spec, tmp_path / "b")
    assert [m.graph.sha256 for m in elsewhere] == [m.graph.sha256 for m in first]


@pytest.mark.parametrize(
    "change",
    [
        {"pretrained": "random:4"},
        {"max_batch": 5},
        {"force_quick_gelu": True},
        {"resize_mode": "squash"},
    ],
)
def test_a_changed_choice_is_exported_again(tmp_path: Path, change: dict):
    spec = EncoderSpec(TINY, "random:3", towers=(Tower.IMAGE,), max_batch=4)
    (first,) = _export(spec, tmp_path)
    (second,) = _export(replace(spec, **change), tmp_path)
    assert second.key != first.key
    assert second.directory == first.directory


def test_a_damaged_export_is_made_again(tmp_path: Path):
    spec = EncoderSpec(TINY, "random:3", towers=(Tower.IMAGE,), max_batch=4)
    (first,) = _export(spec, tmp_path)
    first.graph_files[0].write_bytes(b"damaged")
    (second,) = _export(spec, tmp_path)
    assert second.damaged_files() == []


def test_a_graph_that_disagrees_with_torch_is_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    """What a wrong export looks like: the graph of other weights."""
    from clip_deploy.export import towers

    honest = towers.answers
    monkeypatch.setattr(
        towers, "answers", lambda encoder, inputs: honest(encoder, inputs[::-1].copy())
    )
    arguments = [
        "export",
        TINY,
        "--pretrained",
        "random",
        "--tower",
        "image",
        "--out",
        str(tmp_path / "build"),
    ]
    assert main(arguments) == 4
    err = capsys.readouterr().err
    assert "does not agree with torch: cosine" in err
    assert list((tmp_path / "build").iterdir()) == []


def test_rows_that_influence_one_another_fail_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from clip_deploy.export import parity

    honest = parity.session

    def leaking(graph: Path):
        encode = honest(graph)
        return lambda rows: encode(rows) + (0 if len(rows) < 4 else np.float32(1e-4))

    monkeypatch.setattr(parity, "session", leaking)
    with pytest.raises(ExportError, match="rows of a batch change one another"):
        _export(EncoderSpec(TINY, "random", towers=(Tower.IMAGE,), max_batch=4), tmp_path)


def test_an_interrupted_export_leaves_the_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from clip_deploy.export import graph

    spec = EncoderSpec(TINY, "random", towers=(Tower.TEXT,), max_batch=4)
    (first,) = _export(spec, tmp_path)
    monkeypatch.setattr(graph, "finish", lambda folder: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        _export(replace(spec, pretrained="random:9"), tmp_path)
    assert ExportedModel.read(first.directory) == first
    assert [path.name for path in tmp_path.iterdir()] == ["clip_text_encoder"]


def test_a_graph_beyond_the_limit_of_one_file_keeps_its_weights_in_one_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import onnx

    monkeypatch.setattr("clip_deploy.export.graph._ONE_FILE_LIMIT", 1000)
    (exported,) = _export(EncoderSpec(TINY, "random", towers=(Tower.IMAGE,), max_batch=4), tmp_path)
    assert [path.name for path in exported.graph_files] == ["model.onnx", "model.onnx.data"]
    assert exported.graph_files[0].stat().st_size < 1_000_000
    onnx.checker.check_model(str(exported.graph_files[0]))
    assert exported.parity["min_cosine"] > 0.99999


def test_one_file_holds_the_same_graph_as_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The streamed file, read by protobuf, against what onnx itself makes of graph and weight file."""
    import onnx

    spec = EncoderSpec(TINY, "random", towers=(Tower.TEXT,), max_batch=4)
    (one,) = _export(spec, tmp_path / "one")
    monkeypatch.setattr("clip_deploy.export.graph._ONE_FILE_LIMIT", 1000)
    (two,) = _export(spec, tmp_path / "two")
    streamed, loaded = onnx.load(one.graph_files[0]), onnx.load(two.graph_files[0])
    for graph in (streamed, loaded):
        for tensor in graph.graph.initializer:
            tensor.ClearField("data_location")
            tensor.ClearField("external_data")
    assert streamed == loaded
    onnx.checker.check_model(streamed, full_check=True)


def _checkpoint(folder: Path, suffix: str, name: str = "tiny-clip", seed: int = 11) -> Path:
    import torch
    from safetensors.torch import save_file

    path = folder / f"weights{suffix}"
    state = _torch_model(name, seed).state_dict()
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    return path


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_local_checkpoints_are_loaded_and_named_by_digest(tmp_path: Path, suffix: str):
    from clip_deploy.files import digest

    path = _checkpoint(tmp_path, suffix)
    (exported,) = _export(
        EncoderSpec(TINY, str(path), towers=(Tower.IMAGE,), max_batch=4), tmp_path / "build"
    )
    (random,) = _export(
        EncoderSpec(TINY, "random:11", towers=(Tower.IMAGE,), max_batch=4), tmp_path / "random"
    )
    assert exported.source["checkpoint_sha256"] == digest([path])
    assert exported.contract.weights_sha256 == random.contract.weights_sha256
    assert exported.contract.trained is True


@pytest.mark.parametrize("as_model", [True, False])
def test_a_checkpoint_folder_brings_its_own_preprocessing(tmp_path: Path, as_model: bool):
    folder = tmp_path / "model"
    folder.mkdir()
    _checkpoint(tmp_path, ".safetensors").rename(folder / "open_clip_model.safetensors")
    preprocess = {
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
        "resize_mode": "squash",
        "interpolation": "bilinear",
    }
    config = {"model_cfg": json.loads(Path(TINY).read_text()), "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    spec = EncoderSpec(str(folder), None) if as_model else EncoderSpec(TINY, str(folder))
    image, _ = _export(replace(spec, max_batch=4), tmp_path / "build")
    assert image.contract.preprocess.resize_mode == "squash"
    assert image.contract.preprocess.interpolation == "bilinear"
    assert image.contract.preprocess.mean == (0.5, 0.5, 0.5)


def test_a_folder_of_another_architecture_is_refused(tmp_path: Path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "x.safetensors").write_bytes(b"")
    config = json.loads(Path(TINY).read_text()) | {"embed_dim": 64}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    with pytest.raises(ConfigError, match="is not tiny-clip"):
        _export(EncoderSpec(TINY, str(folder)), tmp_path / "build")


class _Evil:
    def __reduce__(self):
        return print, ("this must never run",)


def _save_evil(path: Path) -> None:
    import torch

    torch.save({"state_dict": _Evil()}, path)


def _save_truncated(path: Path) -> None:
    whole = _checkpoint(path.parent, path.suffix.replace(".pth", ".pt")).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


def _save_other(path: Path) -> None:
    shutil.move(_checkpoint(path.parent, ".pt", "tiny-sigmoid"), path)


@pytest.mark.parametrize(
    ("name", "save", "complaint", "remedy"),
    [
        ("evil.pt", _save_evil, "holds more than tensors", "save_file"),
        ("cut.pth", _save_truncated, "is damaged", "copy or download it again"),
        ("cut.safetensors", _save_truncated, "is damaged", "copy or download it again"),
        ("empty.pt", lambda path: path.write_bytes(b""), "is damaged", "copy or download it again"),
        (
            "text.safetensors",
            lambda path: path.write_bytes(b"not tensors at all"),
            "is damaged",
            "copy",
        ),
        (
            "other.pt",
            _save_other,
            "weights of another architecture than tiny-clip",
            "its weights fit tiny-sigmoid",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_that_cannot_be_used_says_why(
    tmp_path: Path, capsys, name: str, save, complaint: str, remedy: str
):
    save(tmp_path / name)
    arguments = [
        "export",
        TINY,
        "--pretrained",
        str(tmp_path / name),
        "--out",
        str(tmp_path / "build"),
    ]
    assert main(arguments) == 4
    out, err = capsys.readouterr()
    assert complaint in err
    assert remedy in err
    assert "must never run" not in out + err
    assert not any((tmp_path / "build").glob("*"))


def test_a_checkpoint_of_a_known_architecture_names_it(tmp_path: Path):
    import torch

    zeros = {
        "visual.conv1.weight": torch.zeros(768, 3, 16, 16),
        "token_embedding.weight": torch.zeros(4, 512),
    }
    zeros["visual.proj"] = torch.zeros(768, 512)
    layers = {f"visual.transformer.resblocks.{i}.ln_1.bias": torch.zeros(1) for i in range(12)}
    torch.save(zeros | layers, tmp_path / "vit-b-16.pt")
    with pytest.raises(ExportError, match="another architecture than ViT-B-32") as caught:
        _export(EncoderSpec("ViT-B-32", str(tmp_path / "vit-b-16.pt")), tmp_path / "build")
    assert "ViT-B-16" in caught.value.remedy


@pytest.mark.parametrize(
    ("model", "pretrained", "complaint", "remedy"),
    [
        ("ViT-B32", "random", "knows no model 'ViT-B32'", "ViT-B-32"),
        ("ViT-B-32", None, "needs weights", "laion2b_s34b_b79k"),
        ("ViT-B-32", "laion2b", "no weights called 'laion2b'", "laion2b_s34b_b79k"),
        ("ViT-B-32", "/nowhere/weights.pt", "no checkpoint at /nowhere/weights.pt", "path"),
        ("nowhere.json", "random", "no model config at nowhere.json", "path"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(
    tmp_path: Path, model, pretrained, complaint: str, remedy: str
):
    with pytest.raises(ConfigError, match=complaint) as caught:
        _export(EncoderSpec(model, pretrained), tmp_path)
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("content", ["{", "[]", '{"embed_dim": 5}'])
def test_a_model_config_that_is_none_is_refused(tmp_path: Path, content: str):
    (tmp_path / "mine.json").write_text(content)
    with pytest.raises(ConfigError, match=r"is not a model config|lacks"):
        _export(EncoderSpec(str(tmp_path / "mine.json"), "random"), tmp_path / "build")


@pytest.mark.parametrize(
    ("model", "pretrained"), [("hf-hub:org/name", None), ("ViT-B-32", "openai")]
)
def test_a_hub_that_cannot_be_reached_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model, pretrained
):
    """The sandbox of CI has no hub; elsewhere this makes sure of it."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ExportError, match="could not be fetched") as caught:
        _export(EncoderSpec(model, pretrained), tmp_path / "build")
    assert "--pretrained" in caught.value.remedy


def test_a_missing_library_of_an_architecture_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from clip_deploy.export import loading

    def fail(*args, **kwargs):
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

    monkeypatch.setattr(loading.open_clip, "create_model", fail)
    with pytest.raises(MissingDependency, match="needs transformers") as caught:
        _export(EncoderSpec(TINY, "random"), tmp_path)
    assert caught.value.remedy == "pip install transformers"


def test_openai_style_weights_on_a_plain_architecture_warn(tmp_path: Path):
    from clip_deploy.export import sources

    (tmp_path / "ViT-B-32-openai.pt").write_bytes(b"")
    spec = EncoderSpec("ViT-B-32", str(tmp_path / "ViT-B-32-openai.pt"))
    (note,) = sources.notes(sources.resolve(spec), spec)
    assert "export ViT-B-32-quickgelu" in note
    for quiet in (replace(spec, force_quick_gelu=True), replace(spec, model="ViT-B-32-quickgelu")):
        assert sources.notes(sources.resolve(quiet), quiet) == []


def test_a_local_checkpoint_of_a_family_with_other_preprocessing_warns(tmp_path: Path):
    from clip_deploy.export import sources

    (tmp_path / "mine.pt").write_bytes(b"")
    spec = EncoderSpec("ViT-B-16-SigLIP", str(tmp_path / "mine.pt"))
    (note,) = sources.notes(sources.resolve(spec), spec)
    assert "--resize-mode squash --mean 0.5,0.5,0.5 --std 0.5,0.5,0.5" in note
    answered = replace(spec, resize_mode="squash")
    assert sources.notes(sources.resolve(answered), answered) == []


def test_random_weights_say_so_loudly(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = [
        "export",
        TINY,
        "--pretrained",
        "random",
        "--tower",
        "image",
        "--max-batch",
        "2",
        "--out",
        str(tmp_path),
        "--json",
        "-",
    ]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert "the vectors mean nothing" in err
    (model,) = json.loads(out)
    assert model["contract"]["trained"] is False
    assert model["directory"] == str(tmp_path / "clip_image_encoder")


@pytest.mark.parametrize(
    ("prepare", "complaint"),
    [
        (lambda folder: None, "there is no folder"),
        (lambda folder: folder.mkdir(), "holds 0 pictures"),
        (lambda folder: _pictures(folder, "{"), "cannot be read"),
        (lambda folder: _pictures(folder, '{"cat.jpg": 5}'), "a caption that is not a text"),
        (lambda folder: _pictures(folder, "[1]"), "cannot be read as captions"),
        (
            lambda folder: _pictures(folder, '{"dog.jpg": "a dog"}'),
            "names dog.jpg, which is not there",
        ),
    ],
)
def test_reference_photographs_that_cannot_be_used_say_why(tmp_path: Path, prepare, complaint: str):
    prepare(tmp_path / "photos")
    with pytest.raises(ConfigError, match=complaint):
        _export(EncoderSpec(TINY, "random", images=tmp_path / "photos"), tmp_path / "build")


def _pictures(folder: Path, captions: str) -> None:
    from clip_deploy.resources import photographs_dir

    folder.mkdir()
    for name in ("cat.jpg", "coffee.jpg"):
        shutil.copy(photographs_dir() / name, folder)
    (folder / "captions.json").write_text(captions)


@pytest.mark.skipif(
    not TRAINED.is_dir(), reason="needs ../shared/fixtures/tiny-clip, a small trained CLIP"
)
def test_a_trained_model_finds_every_caption(tmp_path: Path):
    spec = EncoderSpec(
        str(TRAINED / "tiny-clip.json"),
        str(TRAINED / "tiny-clip.safetensors"),
        max_batch=8,
        images=TRAINED / "photos",
    )
    image, text = (
        Reference.read(m.directory / "reference.npz", m.contract.tower)
        for m in _export(spec, tmp_path)
    )
    captions = [text.labels.index(caption) for caption in image.captions]
    ranked = (image.outputs @ text.outputs[captions].T).argmax(axis=1)
    assert ranked.tolist() == list(range(40))
