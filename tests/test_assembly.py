"""A repository on disk: complete before it is visible, a new version each time, nothing overwritten."""

from __future__ import annotations

import errno
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from clip_deploy import repository as repositories
from clip_deploy.artifacts import ExportedModel
from clip_deploy.compare import Reference
from clip_deploy.engines import BACKENDS
from clip_deploy.errors import ConfigError
from clip_deploy.repository import assemble
from clip_deploy.spec import ServingSpec, Tower
from tests.factories import exported


def _add(
    folder: Path, repository: Path, tower: Tower = Tower.IMAGE, backend: str = "python", **choices
):
    directory = folder / tower.model_name
    model = ExportedModel.read(directory) if directory.exists() else exported(folder, tower)
    return assemble(BACKENDS[backend].build(model), ServingSpec(**choices), repository)


def _tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_new_model_has_its_config_its_version_and_what_travels_with_it(tmp_path: Path):
    _add(tmp_path, tmp_path / "models", Tower.TEXT)
    names = [name.split("/", 1)[1] for name in _tree(tmp_path / "models")]
    warmup = [name for name in names if name.startswith("warmup/")]
    assert len(warmup) == 1
    assert sorted(set(names) - set(warmup)) == [
        *("1/manifest.json", "1/model.onnx", "1/model.py", "1/reference.npz", "1/tokenizer.json"),
        "config.pbtxt",
    ]


def test_the_onnxruntime_backend_gets_no_code(tmp_path: Path):
    _add(tmp_path, tmp_path / "models", backend="onnxruntime")
    assert "clip_image_encoder/1/model.py" not in _tree(tmp_path / "models")


def test_a_second_run_adds_a_version_and_overwrites_none(tmp_path: Path):
    models = tmp_path / "models"
    _add(tmp_path, models)
    before = {name: (models / name).read_bytes() for name in _tree(models) if "/1/" in name}
    second = _add(tmp_path, models, max_batch=16)
    assert second.versions == (1, 2)
    assert second.served == (2,)
    assert {name: (models / name).read_bytes() for name in before} == before
    assert "max_batch_size: 16" in (models / "clip_image_encoder" / "config.pbtxt").read_text()


def test_the_next_version_follows_the_highest_whatever_else_lies_there(tmp_path: Path):
    models = tmp_path / "models"
    _add(tmp_path, models)
    (models / "clip_image_encoder" / "7").mkdir()
    (models / "clip_image_encoder" / "notes").mkdir()
    assert _add(tmp_path, models).versions == (1, 7, 8)


def test_warmup_data_is_one_real_row(tmp_path: Path):
    _add(tmp_path, tmp_path / "models")
    reference = Reference.read(tmp_path / "clip_image_encoder" / "reference.npz", Tower.IMAGE)
    (file,) = (tmp_path / "models" / "clip_image_encoder" / "warmup").iterdir()
    assert np.array_equal(np.fromfile(file, np.float32), reference.inputs[0].ravel())


def test_nothing_is_written_when_the_config_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError):
        _add(tmp_path, tmp_path / "models", max_batch=64)
    assert not (tmp_path / "models").exists()


def test_a_failure_half_way_leaves_the_repository_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    models = tmp_path / "models"
    _add(tmp_path, models)
    before = _tree(tmp_path)

    def full(source: Path, target: Path) -> None:
        Path(target).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(ConfigError, match="No space left") as caught:
        _add(tmp_path, models)
    assert "make room" in caught.value.remedy
    assert _tree(tmp_path) == before


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"other")])
def test_an_export_that_was_changed_is_not_served(tmp_path: Path, damage):
    damage(exported(tmp_path).directory / "model.onnx")
    with pytest.raises(ConfigError, match=r"model\.onnx is not what was checked"):
        _add(tmp_path, tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_writers_at_the_same_time_get_versions_of_their_own(tmp_path: Path):
    exported(tmp_path)
    threads = [
        threading.Thread(target=_add, args=(tmp_path, tmp_path / "models")) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (model,) = repositories.read(tmp_path / "models").models
    assert model.versions == tuple(range(1, 9))
    for version in model.versions:
        assert (tmp_path / "models" / model.name / str(version) / "model.onnx").is_file()


def test_reading_gives_models_backends_and_the_versions_that_are_served(tmp_path: Path):
    models = tmp_path / "models"
    for _ in range(3):
        _add(tmp_path, models, version_policy="latest:2")
    _add(tmp_path, models, Tower.TEXT)
    (models / ".hidden").mkdir()
    (models / "README.md").write_text("")
    found = repositories.read(models)
    assert [(m.name, m.backend, m.versions, m.served) for m in found.models] == [
        ("clip_image_encoder", "python", (1, 2, 3), (2, 3)),
        ("clip_text_encoder", "python", (1,), (1,)),
    ]
    assert found.version_folder(found.models[0]).name == "3"


@pytest.mark.parametrize(
    ("config", "served"),
    [
        ("version_policy: { all: {} }", (1, 2, 10)),
        ("version_policy: { specific: { versions: [1, 10] } }", (1, 10)),
        ("", (10,)),
    ],
)
def test_version_policies_decide_what_is_served(
    tmp_path: Path, config: str, served: tuple[int, ...]
):
    for version in ("1", "2", "10"):
        (tmp_path / "models" / "m" / version).mkdir(parents=True)
    (tmp_path / "models" / "m" / "config.pbtxt").write_text(
        f'platform: "onnxruntime_onnx"\n{config}'
    )
    (model,) = repositories.read(tmp_path / "models").models
    assert (model.backend, model.served) == ("onnxruntime", served)


@pytest.mark.parametrize(
    ("prepare", "complaint"),
    [
        (lambda path: None, "there is no model repository"),
        (lambda path: path.mkdir(), "is empty"),
        (lambda path: (path / "m").mkdir(parents=True), "holds no version"),
        (lambda path: _write(path / "m" / "config.pbtxt", b"nonsense: 3"), "line 1, column 1"),
        (
            lambda path: _write(path / "m" / "config.pbtxt", "name: 'ü'".encode("latin-1")),
            "cannot be read",
        ),
        (
            lambda path: _write(
                path / "m" / "1" / "x", b"", config="version_policy: { specific: { versions: 3 } }"
            ),
            "none of which",
        ),
    ],
)
def test_a_repository_that_cannot_be_served_says_why(tmp_path: Path, prepare, complaint: str):
    prepare(tmp_path / "models")
    with pytest.raises(ConfigError, match=complaint):
        repositories.read(tmp_path / "models")


def _write(path: Path, data: bytes, config: str = "") -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    if config:
        (path.parent.parent / "config.pbtxt").write_text(config)
