from __future__ import annotations

import errno
import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from clip_deploy.artifacts import ExportedModel, exported_models
from clip_deploy.errors import ConfigError, ExportError
from clip_deploy.files import building, digest, digest_json, replacing
from clip_deploy.spec import Tower
from tests.factories import exported


def test_an_export_is_read_back_as_it_was_written(tmp_path: Path):
    model = exported(tmp_path, Tower.TEXT)
    assert ExportedModel.read(model.directory) == model


def test_the_parent_of_both_towers_names_both(tmp_path: Path):
    for tower in Tower:
        exported(tmp_path, tower)
    assert [m.name for m in exported_models([tmp_path])] == [
        "clip_image_encoder",
        "clip_text_encoder",
    ]


def test_an_export_given_twice_is_refused(tmp_path: Path):
    model = exported(tmp_path)
    with pytest.raises(ConfigError, match="more than once"):
        exported_models([tmp_path, model.directory])


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "holds no exported model"),
        ("{", "is damaged"),
        ("[]", "does not follow schema"),
        ('{"schema": 99}', "does not follow schema"),
        ('{"schema": 1}', "is damaged"),
    ],
)
def test_a_manifest_that_cannot_be_used_says_why(
    tmp_path: Path, content: str | None, complaint: str
):
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ConfigError, match=complaint) as caught:
        ExportedModel.read(tmp_path)
    assert "export again" in caught.value.remedy


def test_a_manifest_edited_by_hand_is_damaged_not_a_traceback(tmp_path: Path):
    model = exported(tmp_path)
    data = json.loads((model.directory / "manifest.json").read_text())
    data["contract"]["scoring"] = {"kind": "softmax"}
    (model.directory / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="is damaged"):
        ExportedModel.read(model.directory)


def test_changed_and_missing_files_are_found_by_digest(tmp_path: Path):
    model = exported(tmp_path)
    assert model.damaged_files() == []
    (model.directory / "model.onnx").write_bytes(b"not a graph?")
    (model.directory / "reference.npz").unlink()
    assert set(model.damaged_files()) == {"model.onnx", "reference.npz"}


def test_the_digest_of_one_file_is_what_sha256sum_prints(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"abc" * 1_000_000)
    assert digest([tmp_path / "file"]) == hashlib.sha256(b"abc" * 1_000_000).hexdigest()


def test_a_folder_appears_only_when_it_is_complete(tmp_path: Path):
    with building(tmp_path / "out", ExportError) as folder:
        (folder / "file").write_text("new")
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out" / "file").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, ExportError("x", remedy="y")])
def test_an_interrupted_build_leaves_what_was_there(tmp_path: Path, interruption):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("old")
    with (
        pytest.raises((KeyboardInterrupt, ExportError)),
        building(tmp_path / "out", ExportError) as folder,
    ):
        (folder / "file").write_text("half")
        raise interruption
    assert (tmp_path / "out" / "file").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_leftovers_of_killed_runs_are_swept_and_those_of_live_ones_are_not(tmp_path: Path):
    dead, alive = tmp_path / ".out.999999999.x.tmp", tmp_path / f".out.{os.getpid()}.x.tmp"
    dead.mkdir()
    alive.mkdir()
    with building(tmp_path / "out", ExportError):
        pass
    assert not dead.exists()
    assert alive.exists()


def test_a_run_killed_between_its_two_renames_is_put_back(tmp_path: Path):
    old = tmp_path / ".out.999999999.old.tmp"
    old.mkdir()
    (old / "file").write_text("old")
    with pytest.raises(KeyboardInterrupt), building(tmp_path / "out", ExportError):
        raise KeyboardInterrupt
    assert (tmp_path / "out" / "file").read_text() == "old"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_full_or_closed_disk_is_a_failure_with_a_remedy(tmp_path: Path, code: int):
    with (
        pytest.raises(ExportError, match="cannot write") as caught,
        building(tmp_path / "out", ExportError) as folder,
    ):
        (folder / "half").write_text("half")
        raise OSError(code, os.strerror(code))
    assert "make room" in caught.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_a_place_below_a_file_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ExportError, match="cannot write"),
        building(tmp_path / "file" / "out", ExportError),
    ):
        pass


def test_other_errors_of_the_system_stay_themselves(tmp_path: Path):
    with pytest.raises(ConnectionResetError), building(tmp_path / "out", ExportError):
        raise ConnectionResetError(errno.ECONNRESET, "reset")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_keys_do_not_depend_on_the_order_of_a_mapping():
    assert digest_json({"a": 1, "b": [2]}) == digest_json({"b": [2], "a": 1})


def test_an_export_with_external_weights_names_both_files(tmp_path: Path):
    model = exported(tmp_path)
    outside = replace(model, graph=replace(model.graph, data="model.onnx.data"))
    assert [path.name for path in outside.graph_files] == ["model.onnx", "model.onnx.data"]
