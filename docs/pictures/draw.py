"""Draw the pictures of the README from real runs.

clip-deploy smoke-test model_repository --json report.json
python docs/pictures/draw.py smoke report.json
python docs/pictures/draw.py lint
make demo-search
python docs/pictures/draw.py search http://127.0.0.1:8080/
"""

import io
import json
import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console, RenderableType
from rich.terminal_theme import MONOKAI

HERE = Path(__file__).parent


def smoke(report: str) -> None:
    """The table of a smoke test that has run."""
    from clip_deploy.report import Check, Report, Status
    from clip_deploy.report.table import table

    data = json.loads(Path(report).read_text("utf-8"))
    checks = tuple(
        Check(**(check | {"status": Status(check["status"])})) for check in data["checks"]
    )
    _draw(
        table(Report(data["title"], data["facts"], checks)),
        "smoke-test",
        "clip-deploy smoke-test model_repository",
    )


def lint() -> None:
    """Findings in a model that somebody wrote by hand."""
    sys.path.insert(0, str(HERE.parent.parent))
    from clip_deploy.lint import Example, target
    from clip_deploy.lint import lint as judge
    from clip_deploy.report.findings import findings
    from tests.lint_examples import build

    config = """input [ { name: "images", data_type: TYPE_FLOAT32, dims: [ -1, 3, 8, 8 ] } ]
dynamic_batching { max_queue_delay_us: 5000 preferred_batch_size: [ 4, 16 ] }"""
    other = """input [ { name: "images", data_type: TYPE_FP32, dims: [ -1, 3, 8, 8 ] } ]
dynamic_batching { preferred_batch_size: [ 4, 16 ] }
instance_group [ { kind: KIND_GPU } ]"""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        build(Example(config), Path("a") / "model_repository")
        (Path("a") / "model_repository" / "clip_image").rename("clip_text")
        build(Example(other), Path("model_repository"))
        Path("clip_text").rename("model_repository/clip_text")
        text = Path("model_repository/clip_text/config.pbtxt")
        text.write_text(text.read_text().replace("clip_image", "clip_text"))
        report = judge([Path("model_repository")], target("cpu", "24.10"))
        _draw(findings(report), "lint", "clip-deploy lint model_repository")


def search(address: str) -> None:
    """The search page, as a running gateway serves it; in 256 colours, a third of the bytes."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1080, "height": 728})
        page.goto(f"{address}?q=a+cup+of+coffee", wait_until="networkidle")
        page.screenshot(path=str(HERE / "search.png"))
        browser.close()
    picture = Image.open(HERE / "search.png").convert("RGB")
    picture = picture.quantize(palette=picture.quantize(256, Image.Quantize.MAXCOVERAGE))
    picture.save(HERE / "search.png", optimize=True)


def _draw(what: RenderableType, name: str, title: str) -> None:
    console = Console(record=True, width=112, file=io.StringIO(), force_terminal=True)
    console.print(what)
    console.save_svg(str(HERE / f"{name}.svg"), title=title, theme=MONOKAI)


if __name__ == "__main__":
    {"smoke": smoke, "lint": lint, "search": search}[sys.argv[1]](*sys.argv[2:])
