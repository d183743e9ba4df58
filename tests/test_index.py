"""Indexes without an engine: ranking, what is refused, where pictures and captions come from."""

from __future__ import annotations

import asyncio
import io
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clip_deploy.errors import ClipDeployError, ConfigError, InputError
from clip_deploy.indexes import ENGINES, IndexIdentity, open_index
from clip_deploy.indexes.port import require_items, require_query
from clip_deploy.indexes.ranking import Candidate, ranked
from clip_deploy.indexes.sources import open_source
from clip_deploy.inputs.captions import read_captions
from clip_deploy.inputs.gallery import begins_like_a_picture, thumbnail
from clip_deploy.inputs.images import load
from clip_deploy.resources import photographs_dir
from tests.index_parts import IDENTITY, item, vector

CAT = photographs_dir() / "cat.jpg"


def _row(id: str, score: float) -> Candidate:
    return Candidate(id, f"caption of {id}", f"{id}.jpg", score)


def test_two_rankings_are_fused_by_reciprocal_rank():
    hits = ranked(
        [_row("a", 0.9), _row("b", 0.8), _row("c", 0.1)], [_row("c", 7.0), _row("d", 2.0)], 9
    )
    assert [hit.id for hit in hits] == ["c", "a", "b", "d"]
    assert [hit.score for hit in hits] == [1 / 63 + 1 / 61, 1 / 61, 1 / 62, 1 / 62]
    assert [(hit.vector_rank, hit.text_rank, hit.cosine) for hit in hits] == [
        *((3, 1, 0.1), (1, None, 0.9), (2, None, 0.8), (None, 2, None)),
    ]


def test_one_ranking_keeps_its_own_scores():
    by_vector = ranked([_row("b", 0.5), _row("a", 0.7)], None, 9)
    assert [(hit.id, hit.score, hit.cosine, hit.text_rank) for hit in by_vector] == [
        ("a", 0.7, 0.7, None),
        ("b", 0.5, 0.5, None),
    ]
    by_text = ranked(None, [_row("b", 3.5)], 9)
    assert [(hit.score, hit.cosine, hit.vector_rank, hit.text_rank) for hit in by_text] == [
        (3.5, None, None, 1)
    ]


def test_ties_go_by_id_whatever_the_order_they_came_in():
    rows = [_row(id, 0.5) for id in "dbca"]
    assert [hit.id for hit in ranked(rows, None, 3)] == ["a", "b", "c"]
    assert ranked(rows, rows[::-1], 4) == ranked(rows[::-1], rows, 4)


def test_fusion_is_the_arithmetic_of_lancedbs_own_reranker():
    pa = pytest.importorskip("pyarrow")
    rerankers = pytest.importorskip("lancedb.rerankers")
    order = np.random.default_rng(1)
    nearest = [_row(f"{n:02d}", 1.0 - place / 50) for place, n in enumerate(order.permutation(30))]
    matching = [
        _row(f"{n:02d}", 9.0 - place / 9) for place, n in enumerate(order.permutation(30)[:12])
    ]
    tables = [
        pa.table({"_rowid": [int(row.id) for row in rows], name: [row.score for row in rows]})
        for rows, name in ((nearest, "_distance"), (matching, "_score"))
    ]
    theirs = rerankers.RRFReranker(K=60).rerank_hybrid("", *tables).to_pydict()
    expected = dict(zip((f"{n:02d}" for n in theirs["_rowid"]), theirs["_relevance_score"]))
    mine = {hit.id: hit.score for hit in ranked(nearest, matching, 30)}
    assert mine.keys() == expected.keys()
    assert all(abs(mine[id] - expected[id]) < 1e-6 for id in mine)


@pytest.mark.parametrize(
    ("query", "what"),
    [
        ({"vector": None, "text": None}, "nothing to search for"),
        (
            {"vector": vector(1)[:3]},
            r"float32 \[3\]; the index holds vectors of tiny/random \(32 numbers",
        ),
        ({"vector": vector(1).astype(np.float64)}, "float64"),
        ({"vector": np.zeros(32, np.float32)}, "not length 1"),
        ({"vector": np.full(32, np.nan, np.float32)}, "not length 1"),
        ({"text": "x" * 2001}, "2,001 characters"),
        ({"text": "cat", "limit": 0}, "a limit of 0"),
        ({"text": "cat", "limit": 1001}, "a limit of 1001"),
    ],
)
def test_questions_that_have_no_answer_are_refused(query: dict, what: str):
    values = {"vector": None, "text": None, "limit": 12} | query
    with pytest.raises(ConfigError, match=what) as caught:
        require_query(IDENTITY, **values)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("items", "what"),
    [
        ([item("a", 1), item("a", 2)], "an id occurs twice"),
        ([item("", 1)], "cannot be an id"),
        ([item("x" * 513, 1)], "cannot be an id"),
        ([item("a\0b", 1)], "cannot be an id"),
        ([item("a", 1, "x" * 4001)], "4,001 characters"),
        ([item("a", 1, "half \ud800")], "half of a character"),
        ([replace(item("a", 1), vector=vector(1) * 2)], "not length 1"),
        ([replace(item("a", 1), vector=np.ones(5, np.float32))], "float32"),
    ],
)
def test_items_that_cannot_be_stored_are_refused(items: list, what: str):
    with pytest.raises(ConfigError, match=what):
        require_items(IDENTITY, items)


@pytest.mark.parametrize(
    "other", [replace(IDENTITY, weights_sha256="b" * 64), replace(IDENTITY, embed_dim=64)]
)
def test_vectors_of_another_model_do_not_belong_into_an_index(other: IndexIdentity):
    IDENTITY.require(replace(IDENTITY, model="another name of the same weights"), "here")
    with pytest.raises(
        ConfigError, match=r"here holds vectors of tiny/random .* not of tiny/random"
    ):
        IDENTITY.require(other, "here")


@pytest.mark.parametrize("place", ["s3://bucket/x", "ftp://host/x", "lance://x"])
def test_a_place_of_no_engine_names_those_there_are(place: str):
    with pytest.raises(ConfigError, match="no place for an index") as caught:
        asyncio.run(open_index(place))
    assert all(engine.place in caught.value.remedy for engine in ENGINES)


# ---- captions


def test_captions_are_read_from_objects_lists_and_tables(tmp_path: Path):
    expected = {"a.jpg": 'a "cat", sitting', "b.jpg": "고양이"}
    rows = [{"file": name, "caption": text} for name, text in expected.items()]
    for name, text in {
        "object.json": json.dumps(expected),
        "list.json": json.dumps(rows),
        "table.csv": '\ufefffile,price,caption\r\na.jpg,3,"a ""cat"", sitting"\r\nb.jpg,4,고양이\r\n',
    }.items():
        path = tmp_path / name
        path.write_text(text, "utf-8")
        assert read_captions(path) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.json", "{"),
        ("x.json", '{"a.jpg": 3}'),
        ("x.json", "[" * 100_000),
        ("x.json", '[{"file": "a.jpg"}]'),
        ("x.csv", "name;caption\na.jpg;cat\n"),
        ("x.csv", "file,caption\na.jpg\n"),
        ("x.csv", 'file,caption\na.jpg,"cat\n'),
        ("missing.json", None),
    ],
)
def test_captions_that_are_none_are_refused(tmp_path: Path, name: str, text: str | None):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=r"cannot be read as captions|not a text") as caught:
        read_captions(tmp_path / name)
    assert "caption" in caught.value.remedy


# ---- folders


def _taken(source) -> dict[str, str | None]:
    """Source → caption, "-" for no picture, or why it cannot be read."""
    found = {}
    for entry in source:
        try:
            loaded = entry.load()
        except InputError as error:
            found[entry.source] = f"! {error}"
        else:
            found[entry.source] = "-" if loaded is None else loaded.caption
    return found


def test_a_folder_gives_its_pictures_by_content_in_order_with_captions(tmp_path: Path):
    cat = CAT.read_bytes()
    for name in (
        "b/red-shoes_02.jpg",
        "a.jpg",
        "no suffix",
        "c.dat",
        "b/a.jpg",
        ".hidden.jpg",
        ".git/x.jpg",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(cat)
    (tmp_path / "c.txt").write_text(" from a sidecar\n")
    (tmp_path / "list.pdf").write_bytes(b"%PDF-1.7")
    (tmp_path / "captions.json").write_text(
        '{"a.jpg": "both", "b/a.jpg": "this one", "z.jpg": "nobody"}'
    )
    source = open_source(tmp_path)
    assert [entry.source for entry in source] == [
        *(
            "a.jpg",
            "c.dat",
            "c.txt",
            "captions.json",
            "list.pdf",
            "no suffix",
            "b/a.jpg",
            "b/red-shoes_02.jpg",
        ),
    ]
    assert _taken(source) == {
        "a.jpg": "both",
        "c.dat": "from a sidecar",
        "no suffix": "no suffix",
        "b/a.jpg": "this one",
        "b/red-shoes_02.jpg": "red shoes 02",
        **dict.fromkeys(("c.txt", "captions.json", "list.pdf"), "-"),
    }
    assert source.strangers == ("z.jpg",)


def test_what_cannot_be_read_is_told_from_what_is_no_picture(tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.jpg").write_bytes(CAT.read_bytes())
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "real.jpg").write_bytes(CAT.read_bytes())
    (folder / "inside.jpg").symlink_to("real.jpg")
    (folder / "out.jpg").symlink_to(outside / "secret.jpg")
    (folder / "nowhere.jpg").symlink_to("gone")
    (folder / "circle.jpg").symlink_to("circle.jpg")
    (folder / "linked").symlink_to(outside)
    os.mkfifo(folder / "pipe.jpg")
    os.mkfifo(folder / "pipe")
    (folder / "said.jpg").write_bytes(CAT.read_bytes())
    (folder / "said.txt").write_bytes(b"\xff\xfe")
    (folder / "long.jpg").write_bytes(CAT.read_bytes())
    (folder / "long.txt").write_text("x" * 5000)
    found = _taken(open_source(folder))
    assert found.pop("real.jpg") == "real"
    assert found.pop("inside.jpg") == "inside"
    assert [found.pop(name) for name in ("pipe", "long.txt", "said.txt")] == ["-"] * 3
    assert found.pop("out.jpg") == "! it is a link out of the folder"
    assert found.pop("pipe.jpg") == "! it is not a file"
    assert found.pop("said.jpg").startswith("! its caption said.txt cannot be read")
    assert found.pop("long.jpg") == "! its caption is longer than 4,000 characters"
    assert {name: text[:20] for name, text in found.items()} == dict.fromkeys(
        ("nowhere.jpg", "circle.jpg"), "! it cannot be read:"
    )


def test_a_name_that_is_not_utf8_is_spelled_out(tmp_path: Path):
    (tmp_path / os.fsdecode(b"caf\xe9.jpg")).write_bytes(CAT.read_bytes())
    assert _taken(open_source(tmp_path)) == {"caf\\xe9.jpg": "caf\\xe9"}


def test_the_same_name_in_two_folders_is_two_pictures_unless_they_are_called_the_same(
    tmp_path: Path,
):
    ids = []
    for folder, origin in (("x", None), ("y", None), ("x", "shop"), ("y", "shop")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "a.jpg").write_bytes(b"")
        (entry,) = open_source(tmp_path / folder, origin=origin)
        ids.append(entry.id)
    assert len(set(ids)) == 3
    assert ids[2] == ids[3]


def test_a_digest_changes_with_the_file_and_with_the_caption(tmp_path: Path):
    def digest() -> str:
        (entry,) = (entry for entry in open_source(tmp_path) if entry.source == "a.jpg")
        return entry.load().digest()

    (tmp_path / "a.jpg").write_bytes(b"one")
    seen = {digest()}
    assert digest() in seen
    (tmp_path / "a.jpg").write_bytes(b"two")
    seen.add(digest())
    (tmp_path / "a.txt").write_text("words")
    seen.add(digest())
    assert len(seen) == 3


def test_no_source_is_said(tmp_path: Path):
    with pytest.raises(ConfigError, match="there is no"):
        open_source(tmp_path / "none")


# ---- Parquet


def _parquet(path: Path, columns: dict) -> Path:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path)
    return path


def test_a_parquet_file_gives_bytes_paths_captions_and_ids(tmp_path: Path):
    (tmp_path / "shoe-red.jpg").write_bytes(b"a file")
    path = _parquet(
        tmp_path / "x.parquet",
        {
            "id": [7, 8, 9, 10],
            "image": [b"bytes", None, None, None],
            "path": [None, "shoe-red.jpg", "../outside.jpg", None],
            "caption": ["a caption", None, "", "none"],
            "price": [1.5, 2.5, 3.5, 4.5],
        },
    )
    (tmp_path.parent / "outside.jpg").write_bytes(b"secret")
    source = open_source(path)
    assert len(source) == 4
    assert [(entry.id, entry.source) for entry in source] == [
        *(("7", "7"), ("8", "shoe-red.jpg"), ("9", "../outside.jpg"), ("10", "10")),
    ]
    assert _taken(source) == {
        "7": "a caption",
        "shoe-red.jpg": "shoe red",
        "../outside.jpg": "! it is a link out of the folder",
        "10": "! the row has no picture",
    }
    assert [entry.load().data for entry in list(source)[:2]] == [b"bytes", b"a file"]


def test_pictures_as_data_sets_of_hugging_face_hold_them(tmp_path: Path):
    path = _parquet(
        tmp_path / "x.parquet",
        {
            "image": [{"bytes": b"one", "path": "cat.jpg"}, {"bytes": b"two", "path": None}],
            "label": [0, 1],
        },
    )
    assert _taken(open_source(path)) == {"cat.jpg": "cat", "row 2": ""}


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ({"pixels": [b"x"]}, "has the columns pixels: none of pictures"),
        ({"image": ["text"]}, "the column image of .* holds string"),
        ({"image": [b"x"], "caption": [3]}, "the column caption of .* holds int64"),
        ({"path": ["x"], "id": [1.5]}, "the column id of .* holds double"),
    ],
)
def test_a_parquet_file_without_pictures_is_refused(tmp_path: Path, columns: dict, what: str):
    with pytest.raises(ConfigError, match=what):
        open_source(_parquet(tmp_path / "x.parquet", columns))


@pytest.mark.parametrize("data", [b"", b"PAR1", b"\x80\x04K\x01.", b"PAR1" + b"\0" * 50 + b"PAR1"])
def test_a_file_that_is_no_parquet_file_is_refused(tmp_path: Path, data: bytes):
    pytest.importorskip("pyarrow")
    (tmp_path / "x.parquet").write_bytes(data)
    with pytest.raises(ConfigError, match="no Parquet file"):
        open_source(tmp_path / "x.parquet")


def test_a_parquet_file_damaged_inside_is_a_failure_in_words(tmp_path: Path):
    path = _parquet(tmp_path / "x.parquet", {"image": [os.urandom(1000) for _ in range(50)]})
    data = bytearray(path.read_bytes())
    data[4:5000] = os.urandom(4996)
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="is damaged after row"):
        list(open_source(path))


# ---- pictures


def test_thumbnails_are_small_upright_and_white_behind_what_is_transparent():
    clear = Image.new("RGBA", (1000, 500), (255, 0, 0, 0))
    small = Image.open(io.BytesIO(thumbnail(load(clear))))
    assert (small.format, small.size, small.mode) == ("JPEG", (320, 160), "RGB")
    assert small.getpixel((10, 10)) == (255, 255, 255)
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    exif[0x8298] = "somebody"
    Image.new("RGB", (100, 60)).save(file, "JPEG", exif=exif, comment=b"private")
    turned = Image.open(io.BytesIO(thumbnail(load(file.getvalue()))))
    assert turned.size == (60, 100)  # and never enlarged
    assert not turned.getexif()
    assert "comment" not in turned.info


@pytest.mark.parametrize("mode", ["L", "CMYK", "P", "1", "LA", "I;16"])
def test_pictures_of_every_mode_have_a_thumbnail(mode: str):
    small = Image.open(io.BytesIO(thumbnail(load(Image.new(mode, (640, 10))))))
    assert small.size == (320, 5)


def test_a_colour_profile_of_a_camera_goes_along_and_one_of_a_press_does_not():
    for length, kept in ((548, True), (500_000, False)):
        picture = Image.new("RGB", (10, 10))
        picture.info["icc_profile"] = b"p" * length
        small = Image.open(io.BytesIO(thumbnail(load(picture))))
        assert bool(small.info.get("icc_profile")) is kept


@pytest.mark.parametrize(
    "form", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM"]
)
def test_pictures_are_known_by_how_they_begin(form: str):
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, form)
    assert begins_like_a_picture(file.getvalue()[:64])


@pytest.mark.parametrize(
    "data", [b"", b"%PDF-1.7", b"{}", b"<svg>", b"%!PS-Adobe", b"PK\x03\x04", b"\x80\x04"]
)
def test_other_files_do_not_begin_like_pictures(data: bytes):
    assert not begins_like_a_picture(data)


def test_every_failure_of_a_place_has_a_remedy(tmp_path: Path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    pytest.importorskip("lancedb")
    for place, what in (
        (tmp_path / "none", "there is no index"),
        (tmp_path / "full", "is no index, and not empty"),
    ):
        with pytest.raises(ClipDeployError, match=what) as caught:
            asyncio.run(open_index(str(place)))
        assert caught.value.remedy
