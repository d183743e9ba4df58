"""The index in a folder: what it finds, what it survives, and what it says when its files are damaged."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clip_deploy.errors import ConfigError, IndexDamaged
from clip_deploy.indexes import IndexIdentity, open_index
from tests.index_parts import DIM, IDENTITY, ITEMS, item, run, vector

pytestmark = pytest.mark.processes
pytest.importorskip("lancedb", reason="needs LanceDB: pip install 'clip-deploy[index]'")

ROOT = Path(__file__).parent.parent


async def _with(place: Path, *works, create: IndexIdentity | None = None):
    """The answers of an index, opened and closed."""
    index = await open_index(str(place), create=create)
    try:
        return [await work(index) for work in works]
    finally:
        await index.close()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    run(_with(tmp_path / "index", lambda index: index.add(ITEMS), create=IDENTITY))
    return tmp_path / "index"


def _ids(hits) -> list[str]:
    return [hit.id for hit in hits]


def test_a_vector_finds_its_nearest_exactly(place: Path):
    asked = vector(77)
    (hits,) = run(_with(place, lambda index: index.search(vector=asked, limit=9)))
    cosines = {each.id: float(each.vector @ asked) for each in ITEMS}
    assert _ids(hits) == sorted(cosines, key=cosines.__getitem__, reverse=True)
    assert all(abs(hit.cosine - cosines[hit.id]) < 1e-5 and hit.score == hit.cosine for hit in hits)
    assert [hit.vector_rank for hit in hits] == list(range(1, 10))
    assert {hit.text_rank for hit in hits} == {None}
    assert [(hit.caption, hit.source) for hit in hits if hit.id == "i5"] == [("猫の写真", "i5.jpg")]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("cat", {"i0", "i3", "i7"}),  # a stop word of LanceDB's own list for ICU
        ("Cats!", {"i0", "i3", "i7"}),
        ("dog", {"i1"}),
        ("cafe", {"i3"}),
        ("run", {"i8"}),
        ("고양이", {"i2"}),
        ("猫", {"i5"}),
        ("a the of", set()),
        ("", set()),
        ("zebra", set()),
        ('" OR id:* ( AND \\', set()),
    ],
)
def test_words_are_found_in_captions(place: Path, text: str, found: set[str]):
    compacted = [lambda index: index.compact(), lambda index: index.search(text=text)]
    (before,) = run(_with(place, lambda index: index.search(text=text)))
    assert set(_ids(before)) == found
    assert set(_ids(run(_with(place, *compacted))[1])) == found


def test_both_are_fused(place: Path):
    asked = vector(1)
    both, by_text, by_vector = run(
        _with(
            place,
            lambda index: index.search(vector=asked, text="cat", limit=4),
            lambda index: index.search(text="cat"),
            lambda index: index.search(vector=asked),
        )
    )
    expected = {}
    for hits in (by_text, by_vector):
        for rank, hit in enumerate(hits, 1):
            expected[hit.id] = expected.get(hit.id, 0) + 1 / (60 + rank)
    assert [(hit.id, hit.score) for hit in both] == sorted(
        expected.items(), key=lambda row: (-row[1], row[0])
    )[:4]


def test_pictures_that_are_the_same_come_in_order_of_their_ids(place: Path):
    same = [
        item(f"same{n:03d}", 99, "identical") for n in np.random.default_rng(0).permutation(300)
    ]
    searches = [
        lambda index: index.search(vector=vector(99), limit=5),
        lambda index: index.search(text="identical", limit=5),
        lambda index: index.search(vector=vector(99), text="identical", limit=5),
    ]
    _, *before = run(_with(place, lambda index: index.add(same), *searches))
    _, *after = run(_with(place, lambda index: index.compact(), *searches))
    assert [_ids(hits) for hits in before + after] == [[f"same{n:03d}" for n in range(5)]] * 6


def test_an_item_is_replaced_and_removed_whole(place: Path):
    other = replace(item("i1", 50, "a zebra"), sha256="new")
    _, digests, zebra, dog, picture, stats = run(
        _with(
            place,
            lambda index: index.add([other]),
            lambda index: index.digests(),
            lambda index: index.search(text="zebra"),
            lambda index: index.search(text="dog"),
            lambda index: index.thumbnail("i1"),
            lambda index: index.stats(),
        )
    )
    assert digests == {each.id: each.sha256 for each in ITEMS} | {"i1": "new"}
    assert (_ids(zebra), _ids(dog), picture, stats.items) == (["i1"], [], b"jpeg of i1", len(ITEMS))
    _, zebra, picture, left = run(
        _with(
            place,
            lambda index: index.remove(["i1", "never there", "it's"]),
            lambda index: index.search(text="zebra"),
            lambda index: index.thumbnail("i1"),
            lambda index: index.stats(),
        )
    )
    assert (zebra, picture, left.items) == ([], None, len(ITEMS) - 1)
    assert left.bytes > 10_000


def test_ids_and_origins_with_quotes_are_no_sql(place: Path):
    odd = "x' OR '1'='1"
    _, one, all_of_it, picture, none = run(
        _with(
            place,
            lambda index: index.add([item(odd, 3, origin=odd), item("a/b é%2F", 4)]),
            lambda index: index.digests(odd),
            lambda index: index.thumbnail("a/b é%2F"),
            lambda index: index.thumbnail(odd),
            lambda index: index.thumbnail("no' OR 1=1 --"),
        )
    )
    assert list(one) == [odd]
    assert all_of_it == "jpeg of a/b é%2F".encode()
    assert (picture, none) == (b"jpeg of " + odd.encode(), None)


def test_an_index_refuses_another_model_and_another_length(place: Path):
    for other in (replace(IDENTITY, weights_sha256="b" * 64), replace(IDENTITY, embed_dim=64)):
        with pytest.raises(ConfigError, match="holds vectors of") as caught:
            run(_with(place, create=other))
        assert "new index" in caught.value.remedy
    wrong = [replace(item("x", 1), vector=np.ones(64, np.float32) / 8)]
    for work in (
        lambda index: index.search(vector=np.ones(64, np.float32) / 8),
        lambda index: index.add(wrong),
    ):
        with pytest.raises(ConfigError, match=r"float32 \[64\]"):
            run(_with(place, work))
    assert run(_with(place, lambda index: index.stats(), create=IDENTITY))[0].items == len(ITEMS)


def test_an_index_replaced_by_another_models_under_a_reader_is_refused(place: Path):
    async def story() -> None:
        index = await open_index(str(place))
        shutil.rmtree(place)
        other = replace(IDENTITY, weights_sha256="b" * 64)
        await _with(place, lambda index: index.add([item("x", 1)]), create=other)
        with pytest.raises(ConfigError, match="replaced by one of another model"):
            await index.search(vector=vector(1))
        await index.close()

    run(story())


def _answers(place: Path) -> list:
    return run(
        _with(
            place,
            lambda index: index.search(vector=vector(3), limit=30),
            lambda index: index.search(text="cat", limit=30),
            lambda index: index.thumbnail("i3"),
            lambda index: index.digests(),
        )
    )


@pytest.mark.parametrize("how", ["delete", "empty", "half", "garbage", "tail", "middle"])
def test_damage_is_said_or_does_not_matter(place: Path, how: str):
    """Whatever happens to any one file: the same answers, or the failure. Never others, and never none."""
    run(
        _with(
            place, lambda index: index.compact(), lambda index: index.add([item("i3", 3, "a cat")])
        )
    )
    right = _answers(place)
    damage, random_bytes = place.with_name("damaged"), random.Random(1).randbytes
    failed = set()
    for path in sorted(path.relative_to(place) for path in place.rglob("*") if path.is_file()):
        shutil.rmtree(damage, ignore_errors=True)
        shutil.copytree(place, damage)
        file = damage / path
        data = file.read_bytes()
        third = len(data) // 3
        changed = {
            "empty": b"",
            "half": data[: len(data) // 2],
            "garbage": random_bytes(len(data)),
            "tail": data[:-7],
            "middle": data[:third] + random_bytes(third) + data[2 * third :],
        }
        file.unlink() if how == "delete" else file.write_bytes(changed[how])
        try:
            assert _answers(damage) == right, path
        except IndexDamaged as error:
            assert str(damage) in str(error)
            assert "index add" in error.remedy
            failed.add(path.parts[1] if len(path.parts) > 2 else path.name)
    assert {"index.json", "newest.json", "_versions", "data", "_indices"} <= failed


def test_an_older_version_is_not_taken_for_the_newest(place: Path):
    run(_with(place, lambda index: index.add([item("late", 60)])))
    newest = min((place / "items.lance" / "_versions").glob("*.manifest"))  # numbered downwards
    newest.unlink()
    with pytest.raises(IndexDamaged, match="is not there"):
        run(_with(place))


def test_folders_that_are_no_index_are_told_from_damaged_ones(tmp_path: Path, place: Path):
    (tmp_path / "file").write_text("")
    for other in (tmp_path / "file", tmp_path):
        with pytest.raises(ConfigError, match="is no index"):
            run(_with(other, create=IDENTITY))
    (place / "index.json").write_text(json.dumps({"schema": 2}))
    with pytest.raises(ConfigError, match="schema 2"):
        run(_with(place))
    shutil.rmtree(place / "items.lance")
    (place / "index.json").unlink()
    with pytest.raises(IndexDamaged, match=r"index\.json is not there"):
        run(_with(place, create=IDENTITY))


def test_an_empty_folder_becomes_an_index(tmp_path: Path):
    (tmp_path / "new").mkdir()
    assert run(_with(tmp_path / "new", lambda index: index.stats(), create=IDENTITY))[0].items == 0
    assert run(
        _with(tmp_path / "new", lambda index: index.search(vector=vector(1), text="cat"))
    ) == [[]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new"]


WRITER = """
import asyncio, sys
from clip_deploy.indexes import open_index
from tests.index_parts import IDENTITY, item

async def main(place, name, batches):
    index = await open_index(place, create=IDENTITY)
    for batch in range(int(batches)):
        ids = [f"{name}{batch:04d}-{n}" for n in range(10)] + ["shared"]
        await index.add([item(id, len(id), f"batch {name}{batch}") for id in ids])
        if batch % 8 == 7:
            await index.compact()
        print(batch, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


def _writer(place: Path, name: str, batches: int) -> subprocess.Popen:
    arguments = [sys.executable, "-c", WRITER, str(place), name, str(batches)]
    return subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_killed_writer_leaves_whole_batches_and_a_rerun_goes_on(tmp_path: Path):
    place = tmp_path / "index"
    for pause_s in (0.0, 0.02):
        with _writer(place, "w", 1000) as writer:
            done = -1
            while done < 9:
                done = int(writer.stdout.readline())
            time.sleep(pause_s)
            writer.send_signal(signal.SIGKILL)
            done = max([done, *map(int, writer.stdout.read().split())])
        digests, hits = run(
            _with(
                place,
                lambda index: index.digests(),
                lambda index: index.search(text="batch", limit=1000),
            )
        )
        assert len(digests) % 10 == 1, "a batch is there in part"
        assert len(digests) >= 10 * (done + 1) + 1, "what was said to be stored is not"
        assert set(_ids(hits)) <= set(digests)
    with _writer(place, "w", 12) as writer:
        assert len(writer.stdout.read().split()) == 12
    assert writer.returncode == 0


def test_two_writers_at_once_and_a_reader_lose_nothing(tmp_path: Path):
    """Both make the index, write and tidy up; the reader only ever sees whole batches."""
    place = tmp_path / "index"

    async def watch(writers: list[subprocess.Popen]) -> list[int]:
        while not (place / "index.json").exists():
            await asyncio.sleep(0.01)
        index, seen = await open_index(str(place)), []
        while any(writer.poll() is None for writer in writers):
            hits = await index.search(vector=vector(5), text="batch", limit=1000)
            assert len(hits) % 10 == (1 if hits else 0)
            seen.append(len(hits))
        await index.close()
        return seen

    writers = [_writer(place, name, 15) for name in "xy"]
    seen = run(watch(writers))
    for writer in writers:
        assert writer.communicate()[0].split()[-1] == "14"
        assert writer.returncode == 0
    assert seen == sorted(seen)
    assert len(set(seen)) > 3, "the reader never saw it grow"
    assert run(_with(place, lambda index: index.stats()))[0].items == 2 * 150 + 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index"]


def test_a_large_index_is_searched_by_cells_and_small_ones_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With the line between them drawn at 1,000: the nearest of clustered vectors are found, the newest included."""
    monkeypatch.setattr("clip_deploy.indexes.lance.IVF_FROM", 1000)
    monkeypatch.setattr("clip_deploy.indexes.lance.IVF_CELL", 64)
    monkeypatch.setattr("clip_deploy.indexes.lance.LEAST_PROBED", 1)
    random_numbers = np.random.default_rng(3)
    centres = random_numbers.standard_normal((40, DIM))
    made = centres[random_numbers.integers(0, 40, 3000)] + 0.3 * random_numbers.standard_normal(
        (3000, DIM)
    )
    made = (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)
    items = [replace(item(f"{n:04d}", 0), vector=row) for n, row in enumerate(made)]

    async def recall() -> float:
        index = await open_index(str(tmp_path / "index"), create=IDENTITY)
        await index.add(items[:2500])
        await index.compact()
        await index.add(items[2500:])
        found = 0
        for row in made[::60]:
            hits = await index.search(vector=row, limit=10)
            best = set(np.argsort(-made @ row)[:10])
            found += len(best & {int(hit.id) for hit in hits})
        await index.close()
        return found / 10 / len(made[::60])

    assert run(recall()) >= 0.9
    newest = json.loads((tmp_path / "index" / "newest.json").read_text())
    assert newest["trained_rows"] == 2500
