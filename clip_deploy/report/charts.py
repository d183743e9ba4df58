"""Charts as SVG that lives inside a page: one quiet style, no state that outlives a chart. The home of matplotlib."""

from __future__ import annotations

import re
from html import escape
from io import StringIO
from typing import TYPE_CHECKING

from clip_deploy.errors import extra

with extra("bench"):
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axis import Axis

INK, MUTED, RULE = "#1d2733", "#66717e", "#d9dee4"
BLUES = ("#9cc2e5", "#4f8fc7", "#1b4f86")
SAND, GREY, WARNING = "#f0c987", "#c5ced8", "#c2571a"
WIDTH = 9.4
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


def drawn(height: float, title: str, draw: Callable[[Figure], None]) -> str:
    """A chart of the page's width and so many inches high, as SVG with a title for those who cannot see it."""
    with mpl.rc_context(_STYLE | {"svg.hashsalt": title}):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        file = StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = _embedded(file.getvalue())
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)


def _embedded(text: str) -> str:
    """Without what only a file of its own needs; the page's style decides font and width."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(r' (xmlns(:xlink)?="[^"]*"|width="[^"]*pt"|height="[^"]*pt")', "", text, count=4)


def milliseconds_axis(axis: Axis) -> None:
    """Seconds on a logarithmic axis, written in milliseconds."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{1000 * value:,.6g}"))
    axis.set_minor_formatter(NullFormatter())
