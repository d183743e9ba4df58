"""Charts of a benchmark as SVG that lives inside a page: one quiet style, no state that outlives a chart."""

from __future__ import annotations

import re
from contextlib import contextmanager
from io import StringIO
from typing import TYPE_CHECKING, Any

from clip_deploy.errors import extra

with extra("bench"):
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from matplotlib.axes import Axes

    from clip_deploy.bench.reports import BenchReport, LoadResult

INK, MUTED, RULE = "#1d2733", "#66717e", "#d9dee4"
# Light to dark: the further out a percentile lies, the heavier its line.
PERCENTILES = {"p50_s": ("p50", "#9cc2e5"), "p90_s": ("p90", "#4f8fc7"), "p99_s": ("p99", "#1b4f86")}
# Where a request spends its time.
PARTS = {"queue": "#f0c987", "model": "#4f8fc7", "the way": "#c5ced8"}
WARNING = "#c2571a"
SIDES = ("#1b4f86", "#c2571a")
_WIDTH = 9.4
_STYLE = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#eceff2",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "svg.fonttype": "none",
}


@contextmanager
def drawing(height: float) -> Iterator[tuple[Figure, list[str]]]:
    """A figure of the page's width; the list holds its SVG once the block has ended."""
    svg: list[str] = []
    with mpl.rc_context(_STYLE | {"svg.hashsalt": str(height)}):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        yield figure, svg
        file = StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg.append(_embedded(file.getvalue()))


def _embedded(text: str) -> str:
    """Without what only a file of its own needs; the page's style decides font and width."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(r' (xmlns(:xlink)?="[^"]*"|width="[^"]*pt"|height="[^"]*pt")', "", text, count=4)
