"""An image search from a model repository: Triton, an index of photographs, the gateway and its page, in one process.

python demo_search.py model_repository          # stays until Ctrl-C
python demo_search.py model_repository --once   # ends after the two queries

The same by hand, in three terminals:

clip-deploy serve model_repository --grpc-port 8001
clip-deploy index add PHOTOGRAPHS --triton 127.0.0.1:8001 --index photos.index
clip-deploy gateway --triton 127.0.0.1:8001 --index photos.index
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from clip_deploy import repository as repositories
from clip_deploy.cli import main as clip_deploy
from clip_deploy.cli.output import Steps, complain
from clip_deploy.errors import ClipDeployError
from clip_deploy.gateway import GatewaySettings
from clip_deploy.gateway.running import run
from clip_deploy.resources import photographs_dir
from clip_deploy.servers import LAUNCHERS, ServerOptions

PICTURE = photographs_dir() / "cat.jpg"
WORDS = "a cup of coffee"
UNTRAINED = """
The weights are random, so the vectors mean nothing: the cat finds itself, because equal pictures have equal vectors,
and words find only what captions say. With a real model: make demo PRETRAINED=laion2b_s34b_b79k"""
BOUNDARY = "clip-deploy-demo"
console = Console()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("repository", type=Path, nargs="?", default=Path("model_repository"))
    parser.add_argument("--port", type=int, default=8080, help="of the page; 0 picks a free one")
    parser.add_argument("--once", action="store_true", help="end after the two queries")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):  # both unwind what follows, as Ctrl-C does
        signal.signal(number, signal.default_int_handler)
    try:
        return demonstrate(options.repository, options.port, options.once)
    except KeyboardInterrupt:
        return 130
    except ClipDeployError as error:
        complain(error)
        return error.exit_code


def demonstrate(repository: Path, port: int, once: bool) -> int:
    """Triton ends with this process, however that ends; the gateway is part of it; the index goes with its folder."""
    found = repositories.read(repository)
    with Steps() as steps:
        triton = LAUNCHERS["embedded"].start(found, ServerOptions(), steps)
    with triton, tempfile.TemporaryDirectory() as folder:
        place = str(Path(folder) / "photos.index")
        add = ["index", "add", str(photographs_dir()), "--triton", triton.grpc, "--index", place]
        if code := clip_deploy(add):
            return code
        settings = GatewaySettings(triton.grpc, index=place, port=port)
        visitor = Visitor(once)
        with (Path(folder) / "access.log").open("w", encoding="utf-8") as log:
            run(settings, log, visitor.come)  # until Ctrl-C or SIGTERM
        return visitor.code


class Visitor:
    """Asks the gateway as any program would, from a thread, once it is up."""

    def __init__(self, once: bool) -> None:
        self.code = 1  # until both were answered
        self._once = once

    def come(self, url: str) -> None:
        threading.Thread(target=self._visit, args=(url,), daemon=True).start()

    def _visit(self, url: str) -> None:
        try:
            self._ask(url)
            self.code = 0
        except Exception as error:  # said here, for nobody waits for this thread
            console.print(Text(f"the gateway did not answer: {error!r}", "red"))
        if self._once or self.code:
            os.kill(os.getpid(), signal.SIGINT)  # ends the gateway in peace

    def _ask(self, url: str) -> None:
        by_picture = post(f"{url}/api/v1/search/image", *form(PICTURE))
        query = json.dumps({"text": WORDS}).encode()
        by_words = post(f"{url}/api/v1/search/text", query, "application/json")
        show(f"Pictures like {PICTURE.name}", by_picture)
        show(f"“{WORDS}”", by_words)
        if not by_words["model"]["trained"]:
            console.print(Text(UNTRAINED, "yellow"))
        console.print(f"\nThe page: [bold]{url}/[/bold]    its API: {url}/docs", highlight=False)
        if not self._once:
            console.print("Ctrl-C ends it all.", style="dim")


def post(url: str, body: bytes, kind: str) -> dict:
    request = urllib.request.Request(url, body, {"Content-Type": kind})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def form(file: Path) -> tuple[bytes, str]:
    """The file as a browser's form uploads it."""
    head = (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="{file.name}"\r\n'
    )
    body = f"{head}Content-Type: image/jpeg\r\n\r\n".encode() + file.read_bytes()
    return body + f"\r\n--{BOUNDARY}--\r\n".encode(), f"multipart/form-data; boundary={BOUNDARY}"


def show(title: str, answer: dict) -> None:
    times = ", ".join(f"{stage} {ms:.1f}" for stage, ms in answer["timings_ms"].items())
    table = Table(
        *("#", "score", "cosine", "picture", "caption", "", "file"),
        title=f"\n[bold]{title}[/bold]  [dim]{times} ms[/dim]",
        title_justify="left",
        title_style="",
        box=None,
        padding=(0, 2, 0, 0),
        header_style="dim",
    )
    for rank, hit in enumerate(answer["results"][:5], 1):
        cosine = "" if hit["cosine"] is None else f"{hit['cosine']:.3f}"
        places = (f"#{hit[name]}" if hit[name] else "" for name in ("vector_rank", "text_rank"))
        facts = (str(rank), f"{hit['score']:.3g}", cosine, *places, hit["caption"], hit["source"])
        table.add_row(*map(Text, facts))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
