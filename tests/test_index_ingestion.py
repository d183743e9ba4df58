"""``clip-deploy index``: pictures into an index and out of it, with a stand-in for the server and with a real one."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clip_deploy.cli import main
from clip_deploy.errors import InputError, ServerBusy, ServerUnavailable
from clip_deploy.indexes import open_index
from clip_deploy.indexes.ingestion import Ingestion, ingest
from clip_deploy.indexes.sources import open_source
from clip_deploy.resources import photographs_dir
from tests.index_parts import IDENTITY, Embedder, run

pytest.importorskip("lancedb", reason="needs LanceDB: pip install 'clip-deploy[index]'")

PHOTOGRAPHS = sorted(path.name for path in photographs_dir().glob("*.jpg"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Thirty small pictures, each of its own colour, in two folders."""
    for number in range(30):
        path = tmp_path / "pictures" / ("even", "odd")[number % 2] / f"picture-{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (number * 8, 7 * number % 256, 99)).save(path)
    return tmp_path / "pictures"


def _ingest(
    folder: Path, embedder: Embedder | None = None, **options
) -> tuple[Ingestion, dict[str, str]]:
    """What happened, and what is in the index afterwards: source → caption."""

    async def story():
        index = await open_index(str(folder.parent / "index"), create=IDENTITY)
        try:
            done = await ingest(open_source(folder), embedder or Embedder(), index, **options)
            hits = await index.search(vector=np.eye(1, 32, dtype=np.float32)[0], limit=1000)
            return done, {hit.source: hit.caption for hit in hits}
        finally:
            await index.close()

    return run(story())


def _counts(done: Ingestion) -> tuple[int, int, int, int]:
    return done.added, done.updated, done.unchanged, done.removed


@pytest.mark.processes
def test_pictures_are_embedded_many_at_a_time_and_in_bounded_number(folder: Path):
    embedder, seen = Embedder(takes_s=0.02), []
    done, found = _ingest(folder, embedder, batch=4, watch=lambda *news: seen.append(news))
    assert _counts(done) == (30, 0, 0, 0)
    assert len(found) == 30
    assert found["odd/picture-07.png"] == "picture 07"
    assert 1 < embedder.most_at_once <= 8
    assert seen[0] == (0, 30)
    assert seen[-1] == (30, 30)
    assert seen == sorted(seen)


@pytest.mark.processes
def test_a_second_run_embeds_only_what_changed(folder: Path):
    _ingest(folder)
    embedder = Embedder()
    done, _ = _ingest(folder, embedder)
    assert (_counts(done), embedder.embedded) == ((0, 0, 30, 0), 0)
    Image.new("RGB", (9, 9), "red").save(folder / "odd" / "picture-07.png")
    (folder / "even" / "picture-08.txt").write_text("a caption of its own")
    Image.new("RGB", (9, 9), "blue").save(folder / "new.png")
    (folder / "odd" / "picture-09.png").unlink()
    done, found = _ingest(folder, embedder)
    assert (_counts(done), embedder.embedded) == ((1, 2, 27, 0), 3)
    assert found["even/picture-08.png"] == "a caption of its own"
    assert "odd/picture-09.png" in found
    done, found = _ingest(folder, embedder, prune=True)
    assert _counts(done) == (0, 0, 30, 1)
    assert "odd/picture-09.png" not in found


@pytest.mark.processes
def test_pruning_one_folder_leaves_the_others(folder: Path):
    async def story() -> dict[str, str]:
        index = await open_index(str(folder.parent / "index"), create=IDENTITY)
        for name in ("even", "odd"):
            await ingest(open_source(folder / name), Embedder(), index)
        (folder / "even" / "picture-00.png").unlink()
        done = await ingest(open_source(folder / "even"), Embedder(), index, prune=True)
        assert done.removed == 1
        digests = await index.digests()
        await index.close()
        return digests

    assert len(run(story())) == 29


@pytest.mark.processes
def test_what_could_not_be_looked_into_is_not_taken_for_gone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    _ingest(folder)
    import os

    real = os.scandir

    def refuse(path):
        if str(path).endswith("odd"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    done, found = _ingest(folder, prune=True)
    assert len(found) == 30
    assert done.removed == 0
    assert [row.why for row in done.unread] == ["not looked into: Permission denied"]


@pytest.mark.processes
def test_a_bad_picture_is_listed_and_harms_nobody(folder: Path):
    cat = (photographs_dir() / "cat.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(cat[:2000])
    (folder / "text.jpg").write_text("no picture")
    (folder / "strip.png").write_bytes(b"")
    Image.new("L", (1, 500)).save(folder / "strip.png")
    (folder / "notes.md").write_text("not even called a picture")
    done, found = _ingest(folder, batch=4)
    assert (_counts(done), done.others, len(found)) == ((30, 0, 0, 0), 1, 30)
    why = {row.source: row.why for row in done.unread}
    assert sorted(why) == ["cut.jpg", "strip.png", "text.jpg"]
    assert "damaged" in why["cut.jpg"]
    assert "not a picture" in why["text.jpg"]
    assert "strip of 1 × 500" in why["strip.png"]


@pytest.mark.processes
def test_a_folder_in_which_nothing_can_be_read_is_a_failure_and_prunes_nothing(folder: Path):
    _ingest(folder)
    for path in folder.rglob("*.png"):
        path.write_bytes(b"broken")
    with pytest.raises(
        InputError, match=r"no picture could be read from .*: even/picture-00\.png: "
    ):
        _ingest(folder, prune=True)
    shutil.rmtree(folder)
    folder.mkdir()  # as when a disk is not mounted
    with pytest.raises(InputError, match="no picture could be read"):
        _ingest(folder, prune=True)
    Image.new("RGB", (9, 9)).save(folder / "one.png")
    assert len(_ingest(folder)[1]) == 31


@pytest.mark.processes
def test_a_server_that_fails_ends_it_and_what_was_embedded_is_kept(
    folder: Path, caplog: pytest.LogCaptureFixture
):
    def fail(embedder: Embedder) -> None:
        if embedder.embedded >= 17:
            raise ServerUnavailable("gone", remedy="start it")

    with pytest.raises(ServerUnavailable):
        _ingest(folder, Embedder(fail), batch=4)
    gc.collect()
    assert caplog.text == "", "the failures of its neighbours are printed, too"
    embedder = Embedder()
    done, found = _ingest(folder, embedder)
    assert _counts(done) == (30 - done.unchanged, 0, done.unchanged, 0)
    assert (done.unchanged, embedder.embedded, len(found)) == (17, 13, 30)


@pytest.mark.processes
def test_a_busy_server_is_asked_again(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("clip_deploy.indexes.ingestion._BUSY_PAUSES_S", (0.001,) * 3)
    refusals = iter(range(3))

    def refuse(embedder: Embedder) -> None:
        if next(refusals, None) is not None:
            raise ServerBusy("its queue is full", remedy="later")

    assert _counts(_ingest(folder, Embedder(refuse))[0]) == (30, 0, 0, 0)

    def always(embedder: Embedder) -> None:
        raise ServerBusy("its queue is full", remedy="later")

    shutil.rmtree(folder.parent / "index")
    with pytest.raises(ServerBusy):
        _ingest(folder, Embedder(always))


@pytest.mark.processes
def test_ids_that_occur_twice_in_a_parquet_file_are_listed(folder: Path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = [path.read_bytes() for path in sorted(folder.rglob("*.png"))[:3]]
    table = folder.parent / "x.parquet"
    pq.write_table(
        pa.table({"image": data, "id": ["a", "b", "a"], "caption": ["one", "two", None]}), table
    )
    done, found = _ingest(table)
    assert [(row.source, row.why) for row in done.unread] == [("a", "its id a occurs twice")]
    assert found == {"a": "one", "b": "two"}


# ---- commands, on a real server


def _index(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["index", *map(str, arguments)])
    return code, *capsys.readouterr()


def _json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    code, out, err = _index(capsys, *arguments, "--json", "-")
    assert code == 0, err
    return json.loads(out)


@pytest.mark.export
@pytest.mark.server
def test_photographs_are_indexed_and_found_again(
    tiny_server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    pictures, place = tmp_path / "pictures", tmp_path / "index"
    shutil.copytree(photographs_dir(), pictures)
    (pictures / "broken.jpg").write_text("no picture")
    to = ("--triton", tiny_server.grpc, "--index", place)

    code, out, err = _index(capsys, "add", pictures, *to)
    assert code == 0
    assert "10 added" in out
    assert "broken.jpg" in out
    assert "random weights" in err
    assert "1 of 13 files could not be read" in err
    again = _json(capsys, "add", pictures, *to, "--batch", 3)
    assert (again["added"], again["unchanged"], again["items"]) == (0, 10, 10)
    assert [row["source"] for row in again["unread"]] == ["broken.jpg"]

    for name in PHOTOGRAPHS:
        found = _json(capsys, "search", pictures / name, *to, "--limit", 3)["results"]
        assert (found[0]["source"], found[0]["vector_rank"]) == (name, 1)
        assert found[0]["cosine"] > 0.9999
        assert len(found) == 3

    words = "a cup of coffee"
    by_text = _json(capsys, "search", words, "--index", place, "--mode", "text")["results"]
    assert [hit["source"] for hit in by_text] == ["coffee.jpg"]
    by_vector = _json(capsys, "search", words, *to, "--mode", "vector")["results"]
    both = _json(capsys, "search", words, *to)["results"]
    ranks = {hit["source"]: rank for rank, hit in enumerate(by_vector, 1)}
    expected = {name: 1 / (60 + rank) for name, rank in ranks.items()}
    expected["coffee.jpg"] += 1 / 61
    assert [(hit["source"], hit["score"]) for hit in both] == sorted(
        expected.items(), key=lambda row: -row[1]
    )

    code, out, _ = _index(capsys, "search", pictures / "cat.jpg", *to)
    assert code == 0
    assert "a close-up of a tabby cat's face" in out
    (pictures / "cat.jpg").unlink()
    pruned = _json(capsys, "add", pictures, *to, "--prune")
    assert (pruned["removed"], pruned["items"]) == (1, 9)
    stats = _json(capsys, "stats", "--index", place)
    assert (stats["items"], stats["engine"], stats["model"]["embed_dim"]) == (9, "lancedb", 32)


@pytest.mark.export
@pytest.mark.server
def test_an_interrupted_run_goes_on(
    tiny_server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    pictures, place = tmp_path / "pictures", tmp_path / "index"
    pictures.mkdir()
    with Image.open(photographs_dir() / "cat.jpg") as cat:
        for number in range(200):
            cat.resize((400 + number, 300)).save(pictures / f"{number:03d}.jpg")
    command = [sys.executable, "-m", "clip_deploy", "index", "add", str(pictures), "--batch", "4"]
    command += ["--triton", tiny_server.grpc, "--index", str(place)]

    async def stored() -> int:
        try:
            index = await open_index(str(place))
        except Exception:
            return 0
        try:
            return len(await index.digests())
        finally:
            await index.close()

    def heed() -> None:
        # Where the tests run in the background of a script, SIGINT is ignored from the start.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heed) as process:
        while run(stored()) < 8:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert "the same command goes on from there" in process.stderr.read()
    there = asyncio.run(stored())
    assert 8 <= there < 200
    rest = _json(capsys, "add", pictures, "--triton", tiny_server.grpc, "--index", place)
    assert (rest["unchanged"], rest["added"], rest["items"]) == (there, 200 - there, 200)


@pytest.mark.export
@pytest.mark.server
def test_an_index_of_another_model_is_refused_by_every_command(
    tiny_server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    place = tmp_path / "index"

    async def make() -> None:
        await (await open_index(str(place), create=IDENTITY)).close()

    run(make())
    cat = photographs_dir() / "cat.jpg"
    for arguments in (("add", photographs_dir()), ("search", cat), ("search", "a cat")):
        code, out, err = _index(capsys, *arguments, "--triton", tiny_server.grpc, "--index", place)
        assert (code, out) == (2, "")
        assert "error: the index" in err
        assert "holds vectors of tiny/random" in err
        assert "fix: serve the model" in err


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["search", "cat.jpg"], "there is no file cat.jpg"),
        (["search", "cat", "--image"], "there is no file cat"),
        (["search", "cat", "--image", "--text"], "both --text and --image"),
        (["search", "cat", "--mode", "magic"], "--mode 'magic' is unknown"),
        (["search", "cat"], "--triton is missing"),
        (
            ["search", str(photographs_dir() / "cat.jpg"), "--mode", "text"],
            "a picture holds no words",
        ),
        (["search", "cat.jpg", "--text", "--mode", "text"], "there is no index"),
        (["search", "x" * 5000, "--mode", "text"], "there is no index"),
        (["stats"], "there is no index"),
        (["add", "nowhere", "--triton", "127.0.0.1:1"], "there is no nowhere"),
    ],
)
def test_commands_asked_wrongly_say_so_in_two_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], what: str
):
    code, out, err = _index(capsys, *arguments, "--index", tmp_path / "none")
    assert (code, out) == (2, "")
    assert f"error: {what}" in err
    assert "fix: " in err
    assert not (tmp_path / "none").exists()


@pytest.mark.processes
def test_a_damaged_index_ends_with_its_own_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    place = tmp_path / "index"

    async def make() -> None:
        await (await open_index(str(place), create=IDENTITY)).close()

    run(make())
    (place / "newest.json").write_text("?")
    code, out, err = _index(capsys, "stats", "--index", place)
    assert (code, out) == (8, "")
    assert "error: the index" in err
    assert "is damaged: newest.json" in err
