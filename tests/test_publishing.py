"""Publishing, without a server: what is at a destination at every moment, and what becomes of every bad input."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clip_deploy.cli import main
from clip_deploy.errors import (
    CheckFailed,
    ClipDeployError,
    ConfigError,
    DestinationBusy,
    MissingDependency,
    PublishError,
)
from clip_deploy.files import digest, digest_json
from clip_deploy.publishing import State, holdings, prune, publish, rollback, unlock, verify
from clip_deploy.publishing import stores as stores_module
from clip_deploy.publishing.configs import waiting
from clip_deploy.publishing.locking import LOCK, locked
from clip_deploy.publishing.objects import SERVICES, Objects, open_objects, translated
from clip_deploy.publishing.records import History
from clip_deploy.publishing.stores import Folder
from clip_deploy.repository.rendering import parse_config
from clip_deploy.spec import Tower
from tests.published_repository import repository

pytest.importorskip("onnx")  # the linter reads the graphs

IMAGE, TEXT = (tower.model_name for tower in (Tower.IMAGE, Tower.TEXT))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository(tmp_path_factory.mktemp("first"), "a")


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository(tmp_path_factory.mktemp("second"), "c")


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "dest"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    """Object storage in memory, where no Triton watches the seconds."""
    monkeypatch.setattr("clip_deploy.publishing.objects._CLOCK_S", 0.0)
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory", skip_instance_cache=True)
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    yield Objects(memory, "bucket/models", "s3://bucket/models", SERVICES["s3"])
    memory.store.clear()


def tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def served(dest: Path) -> dict[str, tuple[int, str]]:
    """What a Triton at this destination serves: model → its version, and the digest of that version's files."""
    found = {}
    for config in sorted(dest.glob("*/config.pbtxt")):
        parsed = parse_config(config.read_text("utf-8"), config)
        assert parsed.version_policy.HasField("specific")
        (version,) = parsed.version_policy.specific.versions
        files = [p for p in sorted((config.parent / str(version)).rglob("*")) if p.is_file()]
        found[config.parent.name] = (version, digest(files))
    return found


def source_digests(models: Path) -> dict[str, str]:
    return {
        folder.name: digest([p for p in sorted((folder / "1").rglob("*")) if p.is_file()])
        for folder in sorted(models.iterdir())
    }


# --- what publishing does


def test_a_publication_serves_just_the_files_of_the_repository(first: Path, dest: Path):
    done = publish(first, dest)
    assert done.publication.number == 1
    assert done.former is None
    assert set(done.changed) == {IMAGE, TEXT}
    assert served(dest) == {name: (1, sha) for name, sha in source_digests(first).items()}
    assert not (dest / LOCK).exists()
    (record,) = holdings(dest).publications
    assert record.state is State.SERVED
    assert holdings(dest).serving == 1


def test_a_config_is_kept_word_for_word_but_for_the_version(first: Path, dest: Path):
    publish(first, dest)
    ours, theirs = ((place / IMAGE / "config.pbtxt").read_text() for place in (first, dest))
    assert theirs.startswith(ours)
    assert re.sub(r"\s", "", theirs[len(ours) :]) == "version_policy{specific{versions:1}}"


def test_another_model_takes_the_next_number_and_leaves_the_old_one(
    first: Path, second: Path, dest: Path
):
    publish(first, dest)
    before = tree(dest)
    done = publish(second, dest)
    assert (done.publication.number, done.former) == (2, 1)
    assert served(dest) == {name: (2, sha) for name, sha in source_digests(second).items()}
    after = tree(dest)
    changed = {key for key in before if after.get(key) != before[key]}
    assert changed == {f"{IMAGE}/config.pbtxt", f"{TEXT}/config.pbtxt"}


def test_publishing_the_same_again_changes_nothing(first: Path, dest: Path):
    publish(first, dest)
    before = tree(dest)
    done = publish(first, dest)
    assert done.changed == ()
    assert done.uploaded_bytes == 0
    assert tree(dest) == before


def test_another_setting_of_the_same_files_sends_no_file(first: Path, dest: Path, tmp_path: Path):
    publish(first, dest)
    done = publish(repository(tmp_path / "slow", "a", delay_us=9000), dest)
    assert done.publication.number == 2
    assert done.uploaded_bytes == 0
    assert {name: version for name, (version, _) in served(dest).items()} == {IMAGE: 1, TEXT: 1}
    assert "9000" in (dest / IMAGE / "config.pbtxt").read_text()
    rollback(dest)
    assert "9000" not in (dest / IMAGE / "config.pbtxt").read_text()


def test_until_the_first_version_is_whole_its_config_names_none(first: Path, dest: Path):
    seen = []

    def look(step: str) -> None:
        for config in dest.glob("*/config.pbtxt"):
            (version,) = parse_config(config.read_text(), "").version_policy.specific.versions
            seen.append((config.parent / str(version)).exists())

    publish(first, dest, progress=look)
    assert seen
    assert not any(seen)


def test_a_tower_that_is_not_published_again_stays(first: Path, dest: Path, tmp_path: Path):
    publish(first, dest)
    image = repository(tmp_path / "image", "a", towers=(Tower.IMAGE,), delay_us=1)
    done = publish(image, dest)
    assert done.changed == (IMAGE,)
    assert {model.name for model in done.publication.models} == {IMAGE, TEXT}


# --- the way back


def test_rolling_back_replaces_configs_and_nothing_else(first: Path, second: Path, dest: Path):
    publish(first, dest)
    publish(second, dest)
    before = {
        key: (dest / key).stat().st_mtime_ns for key in tree(dest) if not key.endswith(".json")
    }
    done = rollback(dest)
    assert (done.publication.number, done.former) == (1, 2)
    assert served(dest) == {name: (1, sha) for name, sha in source_digests(first).items()}
    touched = {key for key, time in before.items() if (dest / key).stat().st_mtime_ns != time}
    assert touched == {f"{IMAGE}/config.pbtxt", f"{TEXT}/config.pbtxt"}


def test_what_was_rolled_back_from_is_not_gone_back_to_unasked(
    first: Path, second: Path, dest: Path, tmp_path: Path
):
    publish(first, dest)
    publish(second, dest)
    rollback(dest)
    publish(repository(tmp_path / "third", "d"), dest)
    assert rollback(dest).publication.number == 1
    assert rollback(dest, to=2).publication.number == 2
    assert holdings(dest).serving == 2
    with pytest.raises(PublishError, match="holds no publication 9"):
        rollback(dest, to=9)


def test_there_is_nothing_before_the_first(first: Path, dest: Path):
    publish(first, dest)
    with pytest.raises(PublishError, match="nothing that served before publication 1"):
        rollback(dest)


def test_a_publication_whose_files_are_gone_is_not_gone_back_to(
    first: Path, second: Path, dest: Path
):
    publish(first, dest)
    publish(second, dest)
    (dest / IMAGE / "1" / "model.onnx").unlink()
    before = served(dest)
    with pytest.raises(PublishError, match=r"no longer whole: clip_image_encoder/1/model\.onnx"):
        rollback(dest)
    assert served(dest) == before


# --- cuts


class Cut(OSError):
    """The disk is full, after so many bytes."""

    def __init__(self) -> None:
        super().__init__(errno.ENOSPC, "No space left on device")


def cut_after(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    """Let the folder's own writing fail after ``budget`` bytes, in the middle of a file."""
    left = [budget]

    def write(path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data[: left[0]])
        left[0] -= len(data)
        if left[0] < 0:
            raise Cut

    def send(source: int, target: int) -> int:
        block = os.read(source, 1 << 20)
        os.write(target, block[: max(left[0], 0)])
        left[0] -= len(block)
        if left[0] < 0:
            raise Cut
        return len(block)

    monkeypatch.setattr(stores_module, "_write", write)
    monkeypatch.setattr(stores_module, "_send", send)


def test_an_upload_cut_at_any_byte_leaves_the_old_version_and_goes_on_later(
    first: Path, second: Path, tmp_path: Path
):
    whole = tmp_path / "whole"
    for models in (first, second):
        publish(models, whole)
    wanted, before = served(whole), tmp_path / "before"
    publish(first, before)
    old, shared = served(before), sum(p.stat().st_size for p in before.glob("*/warmup/*"))
    picked = random.Random(7)
    resumed = 0
    for i, budget in enumerate([0, 1, 700, *(picked.randrange(1_880_000) for _ in range(15))]):
        dest = tmp_path / f"dest{i}"
        shutil.copytree(before, dest)
        with pytest.MonkeyPatch.context() as patch:
            cut_after(patch, budget)
            try:
                publish(second, dest)
            except PublishError as error:
                assert "No space left" in str(error)
                assert served(dest) == old, budget
            else:
                assert served(dest) == wanted  # so little was left to write
        (dest / LOCK).unlink(missing_ok=True)
        assert not [key for key in tree(dest) if key.endswith(".tmp")]
        done = publish(second, dest)
        resumed += done.found_bytes > shared
        assert served(dest) == wanted
        assert verify(dest)
        assert set(tree(dest)) == set(tree(whole))
    assert resumed > 8


def test_the_first_upload_cut_at_any_byte_serves_nothing(first: Path, tmp_path: Path):
    for budget in (900, 5_000, 700_000, 2_000_000):
        dest = tmp_path / str(budget)
        with pytest.MonkeyPatch.context() as patch:
            cut_after(patch, budget)
            with pytest.raises(PublishError):
                publish(first, dest)
        for config in dest.glob("*/config.pbtxt"):
            assert config.read_text() == waiting(config.parent.name, "python")
        assert publish(first, dest).publication.number == 1


def test_an_upload_to_objects_cut_at_any_byte_leaves_the_old_version(
    first: Path, second: Path, bucket: Objects, monkeypatch: pytest.MonkeyPatch
):
    """A storage of the worst kind, which keeps half of what was cut."""
    publish(first, bucket)
    configs = [f"{name}/config.pbtxt" for name in (IMAGE, TEXT)]
    old = [bucket.read(key) for key in configs]
    picked = random.Random(3)
    system = bucket._system
    whole = system.put_file
    for budget in [0, *(picked.randrange(1_900_000) for _ in range(8))]:
        left = [budget]

        def put_file(lpath: str, rpath: str, left: list[int] = left, **_: Any) -> None:
            data = Path(lpath).read_bytes()
            system.pipe_file(rpath, data[: max(left[0], 0)])
            left[0] -= len(data)
            if left[0] < 0:
                raise ConnectionResetError(errno.ECONNRESET, "cut")

        monkeypatch.setattr(system, "put_file", put_file)
        with pytest.raises(PublishError, match="cut"):
            publish(second, bucket)
        assert [bucket.read(key) for key in configs] == old
        assert bucket.read(LOCK) is None
    monkeypatch.setattr(system, "put_file", whole)
    assert publish(second, bucket).publication.number == 2
    assert verify(bucket)
    assert rollback(bucket).publication.number == 1
    assert [bucket.read(key) for key in configs] == old


def test_bytes_that_change_on_the_way_are_noticed(
    first: Path, second: Path, dest: Path, monkeypatch: pytest.MonkeyPatch
):
    publish(first, dest)
    old = served(dest)
    put = Folder.put

    def mangled(self: Folder, source: Path, key: str, moved: Any) -> None:
        put(self, source, key, moved)
        if key.endswith("model.onnx"):
            data = bytearray((self.path / key).read_bytes())
            data[-1] ^= 1
            (self.path / key).write_bytes(data)

    monkeypatch.setattr(Folder, "put", mangled)
    with pytest.raises(PublishError, match="reads back as other bytes"):
        publish(second, dest)
    assert served(dest) == old


def test_too_little_room_is_said_before_anything_is_written(
    first: Path, second: Path, dest: Path, monkeypatch: pytest.MonkeyPatch
):
    publish(first, dest)
    keys = set(tree(dest))
    usage = stores_module.shutil.disk_usage(dest)._replace(free=1000)
    monkeypatch.setattr(stores_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(PublishError, match="has room for") as failure:
        publish(second, dest)
    assert "prune" in failure.value.remedy
    assert set(tree(dest)) - keys == {
        "publication-2.json"
    }  # its number is taken, and no file is there


# --- two at once


def test_the_second_of_two_publishers_is_told_who_the_first_is(first: Path, dest: Path):
    with (
        locked(Folder(dest), "publish"),
        pytest.raises(
            DestinationBusy, match=r"is held by \S+@\S+ since 20\d\d-.* \(publish, process"
        ),
    ):
        publish(first, dest)
    assert publish(first, dest).publication.number == 1


def test_of_two_publishers_at_the_same_moment_none_spoils_the_other(
    first: Path, second: Path, dest: Path
):
    start, outcomes = threading.Barrier(2), []

    def run(models: Path) -> None:
        start.wait()
        try:
            outcomes.append(publish(models, dest).publication.number)
        except DestinationBusy as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=run, args=(models,)) for models in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = [each for each in outcomes if isinstance(each, int)]
    assert sorted(numbers) in ([1], [1, 2])
    assert len(outcomes) == 2
    assert verify(dest)
    assert served(dest)


@pytest.mark.parametrize("kind", ["dead", "elsewhere", "garbage"])
def test_a_lock_that_was_left_is_explained_and_never_taken(first: Path, dest: Path, kind: str):
    said = {"by": "ann@build", "host": "build", "pid": 2**22 + 1, "began": "2026-01-01T00:00:00Z"}
    said |= {"action": "publish"}
    if kind == "dead":
        said["host"] = stores_module.os.uname().nodename
    dest.mkdir()
    text = "{" if kind == "garbage" else json.dumps(said)
    (dest / LOCK).write_text(text)
    with pytest.raises(DestinationBusy) as failure:
        publish(first, dest)
    assert ("no longer runs" in str(failure.value)) is (kind == "dead")
    assert f"published unlock {dest}" in failure.value.remedy
    assert (dest / LOCK).read_text() == text
    assert unlock(dest)
    assert unlock(dest) is None
    assert publish(first, dest)


def test_a_publisher_whose_lock_was_taken_changes_nothing_more(
    first: Path, second: Path, dest: Path
):
    publish(first, dest)
    old = served(dest)

    def steal(step: str) -> None:
        if "model.onnx" in step:
            (dest / LOCK).write_text("{}")

    with pytest.raises(DestinationBusy, match="was taken over"):
        publish(second, dest, progress=steal)
    assert served(dest) == old
    assert (dest / LOCK).read_text() == "{}"


# --- destinations that are not as we left them


def test_a_foreign_destination_is_left_untouched(first: Path, dest: Path):
    (dest / "resnet" / "1").mkdir(parents=True)
    (dest / "resnet" / "1" / "model.onnx").write_bytes(b"theirs")
    before = tree(dest)
    with pytest.raises(PublishError, match="holds resnet, which clip-deploy did not publish"):
        publish(first, dest)
    assert tree(dest) == before


def _record(dest: Path, **changes: Any) -> None:
    """Change a record, and seal it again as if it were right."""
    path = dest / "publication-1.json"
    data = json.loads(path.read_text()) | changes
    data.pop("seal")
    path.write_text(json.dumps(data | {"seal": digest_json(data)}))


@pytest.mark.parametrize(
    ("damage", "message", "remedy"),
    [
        (lambda d: _record(d, schema=2), "follows layout 2", "upgrade clip-deploy"),
        (lambda d: _record(d, number=5), "is damaged", "put the original back"),
        (lambda d: _record(d, state="lost"), "is damaged", "put the original back"),
        (lambda d: _record(d, models=[{"name": "../../home"}]), "is damaged", "put the original"),
        (
            lambda d: (d / "publication-1.json").write_text(
                (d / "publication-1.json")
                .read_text()
                .replace('"state": "served"', '"state": "complete"')
            ),
            "was changed by hand",
            "put the original back",
        ),
        (lambda d: (d / "publication-1.json").write_text("[]"), "is damaged", "put the original"),
        (
            lambda d: (d / "publication-1.json").write_text("{" * 99999),
            "is damaged",
            "put the orig",
        ),
    ],
    ids=["newer", "number", "state", "name", "edited", "list", "deep"],
)
def test_a_record_that_is_not_ours_stops_everything(
    first: Path, second: Path, dest: Path, damage: Any, message: str, remedy: str
):
    publish(first, dest)
    damage(dest)
    before = tree(dest)
    for action in (
        lambda: publish(second, dest),
        lambda: rollback(dest),
        lambda: prune(dest, keep=1),
        lambda: verify(dest),
        lambda: holdings(dest),
    ):
        with pytest.raises(PublishError, match=message) as failure:
            action()
        assert remedy in failure.value.remedy
    assert tree(dest) == before


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../b", ""])
def test_a_record_can_name_nothing_outside_its_model(first: Path, dest: Path, name: str):
    publish(first, dest)
    models = json.loads((dest / "publication-1.json").read_text())["models"]
    models[0]["files"] = {name: {"sha256": "0" * 64, "bytes": 1}}
    _record(dest, models=models)
    with pytest.raises(PublishError, match="is damaged"):
        holdings(dest)


def test_a_config_changed_by_hand_is_not_overwritten_unasked(first: Path, second: Path, dest: Path):
    publish(first, dest)
    config = dest / IMAGE / "config.pbtxt"
    config.write_text(config.read_text() + "# tuned at night\n")
    with pytest.raises(PublishError, match="was changed by hand"):
        publish(second, dest)
    assert "tuned at night" in config.read_text()
    assert rollback(dest, to=1).changed == (IMAGE,)
    assert publish(second, dest).publication.number == 2


def test_a_folder_that_nobody_recorded_is_never_written_into(first: Path, second: Path, dest: Path):
    publish(first, dest)
    (dest / IMAGE / "7").mkdir()
    (dest / IMAGE / "7" / "model.onnx").write_bytes(b"theirs")
    assert publish(second, dest).publication.number == 8
    assert (dest / IMAGE / "7" / "model.onnx").read_bytes() == b"theirs"


def test_half_a_switch_is_said_and_publishing_again_ends_it(first: Path, second: Path, dest: Path):
    publish(first, dest)
    old = (dest / TEXT / "config.pbtxt").read_bytes()
    publish(second, dest)
    (dest / TEXT / "config.pbtxt").write_bytes(old)
    assert holdings(dest).serving is None
    with pytest.raises(PublishError, match="between two publications"):
        rollback(dest)
    with pytest.raises(PublishError, match="between two publications"):
        prune(dest, keep=1)
    publish(second, dest)
    assert {version for version, _ in served(dest).values()} == {2}
    assert holdings(dest).serving is not None


# --- repositories that cannot be published


def test_towers_of_different_weights_are_not_served_side_by_side(
    first: Path, dest: Path, tmp_path: Path
):
    publish(first, dest)
    old = served(dest)
    image = repository(tmp_path / "image", "e", towers=(Tower.IMAGE,))
    with pytest.raises(ConfigError, match="come from different weights"):
        publish(image, dest)
    assert served(dest) == old


def test_a_repository_with_an_error_is_not_uploaded(dest: Path, tmp_path: Path):
    models = repository(tmp_path / "broken")
    (models / IMAGE / "1" / "model.onnx").write_bytes(b"half a graph")
    with pytest.raises(ClipDeployError):
        publish(models, dest)
    assert not dest.exists()


def test_a_file_that_is_not_what_was_exported_is_not_published(
    first: Path, dest: Path, tmp_path: Path
):
    publish(first, dest)
    old = served(dest)
    models = repository(tmp_path / "damaged", "f")
    path = models / TEXT / "1" / "reference.npz"
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(ClipDeployError):
        publish(models, dest)
    assert served(dest) == old


def test_several_served_versions_are_refused(dest: Path, tmp_path: Path):
    models = repository(tmp_path / "several")
    repository_again = models / IMAGE / "2"
    (models / IMAGE / "1").rename(repository_again)
    shutil.copytree(repository_again, models / IMAGE / "1")
    config = models / IMAGE / "config.pbtxt"
    config.write_text(config.read_text() + "version_policy { all { } }\n")
    with pytest.raises(ConfigError, match="one at a time is published"):
        publish(models, dest)


@pytest.mark.parametrize("inside", ["", "sub", ".."])
def test_a_repository_is_not_published_into_itself(first: Path, inside: str):
    with pytest.raises(ConfigError, match="lie inside one another"):
        publish(first, first / inside)


def test_shared_files_are_never_changed_under_a_published_version(
    first: Path, dest: Path, tmp_path: Path
):
    publish(first, dest)
    old = served(dest)
    models = repository(tmp_path / "other", "b")
    (warmup,) = (dest / IMAGE / "warmup").iterdir()
    warmup.write_bytes(b"another")
    with pytest.raises(PublishError, match="published versions share it"):
        publish(models, dest)
    assert served(dest) == old


# --- clearing away


def test_pruning_keeps_the_newest_and_what_serves(first: Path, dest: Path, tmp_path: Path):
    publish(first, dest)
    for letter in "bcd":
        publish(repository(tmp_path / letter, letter), dest)
    rollback(dest, to=2)
    done = prune(dest, keep=1)
    assert done.publications == (1, 3)
    assert [each.number for each in holdings(dest).publications] == [2, 4]
    assert sorted(p.name for p in (dest / IMAGE).iterdir()) == ["2", "4", "config.pbtxt", "warmup"]
    assert done.freed_bytes > 3_000_000
    assert verify(dest)
    assert rollback(dest, to=4).publication.number == 4
    assert publish(repository(tmp_path / "e", "e"), dest).publication.number == 5


def test_pruning_clears_away_what_a_cut_upload_left(first: Path, second: Path, dest: Path):
    publish(first, dest)
    keys = set(tree(dest))
    with pytest.MonkeyPatch.context() as patch:
        cut_after(patch, 1_500_000)
        with pytest.raises(PublishError):
            publish(second, dest)
    assert set(tree(dest)) > keys
    assert prune(dest, keep=5).publications == (2,)
    assert set(tree(dest)) == keys


def test_verifying_finds_a_byte_that_changed(first: Path, dest: Path):
    publish(first, dest)
    assert verify(dest) == len([k for k in tree(dest) if k.count("/") > 1]) + 2
    path = dest / IMAGE / "1" / "reference.npz"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckFailed, match=r"1/reference\.npz was changed"):
        verify(dest)
    path.unlink()
    with pytest.raises(CheckFailed, match="is gone"):
        verify(dest, number=1)


# --- object storage


def test_objects_are_published_rolled_back_and_pruned(first: Path, second: Path, bucket: Objects):
    for models in (first, second):
        publish(models, bucket)
    assert rollback(bucket).publication.number == 1
    assert publish(second, bucket).publication.number == 3  # the same files: only configs
    assert prune(bucket, keep=1).publications == (1, 2)
    assert bucket.folders() == [IMAGE, TEXT]
    assert [each.number for each in History.read(bucket).publications] == [3]
    assert verify(bucket)
    with locked(bucket, "publish"), pytest.raises(DestinationBusy):
        publish(first, bucket)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ftp://host/models", "no storage ftp://"),
        ("s3://", "is no address"),
        ("s3://user:secret@host/models", "is no address"),
        ("as://account", "is no address"),
    ],
)
def test_an_address_that_is_none_is_refused(address: str, message: str):
    with pytest.raises(ConfigError, match=message):
        open_objects(address)


@pytest.mark.parametrize(
    ("kind", "parents", "message"),
    [
        ("NoCredentialsError", (Exception,), "there are no credentials for S3"),
        ("DefaultCredentialsError", (Exception,), "there are no credentials"),
        ("PermissionError", (PermissionError,), "S3 refuses"),
        ("ClientAuthenticationError", (Exception,), "S3 refuses"),
        ("EndpointConnectionError", (Exception,), "the connection to s3://b failed"),
        ("ServerDisconnectedError", (OSError,), "the connection to s3://b failed"),
        ("HttpError", (Exception,), "answers with an error"),
    ],
)
def test_failures_of_every_library_are_put_in_words(kind: str, parents: Any, message: str):
    with (
        pytest.raises(PublishError, match=re.escape(message)),
        translated(SERVICES["s3"], "s3://b"),
    ):
        raise type(kind, parents, {})("what it said")


def test_a_bug_is_not_dressed_up_as_trouble_with_the_storage():
    with pytest.raises(TypeError), translated(SERVICES["s3"], "s3://b"):
        raise TypeError("a bug")


def test_a_storage_whose_package_is_absent_names_it(monkeypatch: pytest.MonkeyPatch):
    fsspec = pytest.importorskip("fsspec")

    def refuse(protocol: str) -> None:
        raise ImportError("no gcsfs")

    monkeypatch.setattr(fsspec, "get_filesystem_class", refuse)
    with pytest.raises(MissingDependency) as failure:
        open_objects("gs://bucket/models")
    assert failure.value.remedy == "pip install gcsfs"


# --- the command line


def test_the_commands_tell_the_whole_story(
    first: Path, second: Path, dest: Path, capsys: pytest.CaptureFixture[str]
):
    for models in (first, second):
        assert main(["publish", str(models), str(dest)]) == 0
    out = capsys.readouterr()
    assert "publication 2 serves, before it 1" in out.out
    assert f"published rollback {dest}" in out.err
    assert main(["published", "rollback", str(dest), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["number"] == 1
    assert main(["published", "list", str(dest)]) == 0
    out = capsys.readouterr().out
    assert "▶" in out
    assert "withdrawn" in out
    assert main(["published", "verify", str(dest)]) == 0
    assert main(["published", "prune", str(dest), "--keep", "1"]) == 0
    assert main(["published", "unlock", str(dest)]) == 0
    assert "there was no lock" in capsys.readouterr().out


def test_failures_are_two_lines_and_a_code(
    first: Path, dest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (dest / "theirs").mkdir(parents=True)
    (dest / "theirs" / "file").write_text("x")
    assert main(["publish", str(first), str(dest)]) == 9
    err = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in err if re.match("error|fix", line)] == [
        "error",
        "fix",
    ]
    assert main(["publish", str(tmp_path / "none"), str(dest)]) == 2
    assert main(["publish", str(first), "ftp://x"]) == 2
    assert main(["published", "rollback", str(dest)]) == 9
    assert main(["published", "prune", str(tmp_path), "--keep", "0"]) == 2


def test_an_old_version_that_was_damaged_is_sent_again(first: Path, second: Path, dest: Path):
    publish(first, dest)
    publish(second, dest)
    path = dest / IMAGE / "1" / "model.onnx"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    publish(first, dest)
    assert {name: version for name, (version, _) in served(dest).items()} == {IMAGE: 3, TEXT: 1}
    assert {name: sha for name, (_, sha) in served(dest).items()} == source_digests(first)
