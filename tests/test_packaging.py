"""What a user installs: the wheel has the templates, the photographs and the page, and nothing that it should not have."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.standin import StandIn

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "clip_deploy" / "gateway" / "page"
pytest.importorskip("hatchling", reason="needs hatchling: pip install 'clip-deploy[dev]'")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (path,) = out.glob("*.whl")
    return path


@pytest.mark.processes
def test_the_wheel_has_what_the_code_looks_for(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "clip_deploy/templates/config.pbtxt.j2",
        "clip_deploy/templates/python/model.py",
        "clip_deploy/templates/deploy/compose.yaml.j2",
        "clip_deploy/photographs/captions.json",
        "clip_deploy/photographs/cat.jpg",
        "clip_deploy/photographs/LICENSES.md",
        *(f"clip_deploy/gateway/page/{path.name}" for path in PAGE.iterdir()),
    } <= names
    assert not [
        n for n in names if n.startswith(("tests/", "docs/", "benchmarks/")) or n.endswith(".onnx")
    ]
    assert wheel.stat().st_size < 2_000_000


@pytest.mark.processes
def test_an_unpacked_wheel_renders(wheel: Path, tmp_path: Path):
    """As installed: away from the checkout, templates inside the package."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "from clip_deploy.resources import *; import clip_deploy; print(templates_dir()); print(photographs_dir())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        str(tmp_path / "clip_deploy" / "templates"),
        str(tmp_path / "clip_deploy" / "photographs"),
    ]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an empty environment with ``clip-deploy[client]`` and what it brings, from PyPI."""
    folder = tmp_path_factory.mktemp("client")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    done = subprocess.run([*install, f"{wheel}[client]"], capture_output=True, text=True)
    if done.returncode and re.search(
        "No matching distribution|Connection|Max retries", done.stderr
    ):
        pytest.skip("needs PyPI")
    assert done.returncode == 0, done.stderr
    return python


@pytest.mark.processes
def test_the_client_installs_without_torch_cuda_and_web_frameworks(installed: Path):
    code = "from importlib.metadata import distributions as d; print(*sorted(x.name.lower() for x in d()))"
    done = subprocess.run([installed, "-c", code], capture_output=True, text=True, check=True)
    names = done.stdout.split()
    assert "clip-deploy" in names
    heavy = (
        r"torch|nvidia|cuda|fastapi|starlette|openvino|onnx|matplotlib|triton$|gevent|scipy|pandas"
    )
    assert [name for name in names if re.match(heavy, name)] == []
    folder = installed.parent.parent
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file() and not f.is_symlink())
    assert size < 250_000_000


@pytest.mark.processes
def test_the_installed_client_embeds_and_says_in_two_lines_when_nobody_answers(
    installed: Path, tmp_path: Path
):
    code = """
import sys
from clip_deploy.client import TritonInferenceClient
with TritonInferenceClient(sys.argv[1]) as client:
    print(len(client.request_embedding(sys.argv[2])), client.embed_texts(["a cat"]).shape)
"""
    cat = str(ROOT / "clip_deploy" / "photographs" / "cat.jpg")
    with StandIn(tmp_path).serving() as url:
        command = [installed, "-c", code, url, cat]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.stdout == "512 (1, 512)\n", done.stderr
    smoke = [installed, "-m", "clip_deploy", "smoke-test", "--url", url]
    done = subprocess.run(smoke, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 6
    assert f"no server answers at {url}" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 2


def test_the_base_install_has_no_heavy_dependency():
    text = (ROOT / "pyproject.toml").read_text()
    base = text.partition("dependencies = [")[2].partition("]\n")[0]
    names = re.findall(r'^\s*"([A-Za-z0-9_-]+)', base, re.MULTILINE)
    assert set(names) == {
        "typer",
        "rich",
        "jinja2",
        "tritonclient",
        "numpy",
        "pillow",
        "tokenizers",
        "tomli",
        "ftfy",
    }


def test_every_photograph_has_a_caption_and_a_licence():
    folder = ROOT / "clip_deploy" / "photographs"
    licences, captions = (
        (folder / "LICENSES.md").read_text(),
        (folder / "captions.json").read_text(),
    )
    pictures = sorted(folder.glob("*.jpg"))
    assert len(pictures) == 10
    for picture in pictures:
        assert f"`{picture.name}`" in licences
        assert f'"{picture.name}"' in captions
