"""Draw docs/pictures/smoke-test.svg from a report that a real run wrote.

clip-deploy smoke-test model_repository --json report.json && python docs/pictures/draw.py report.json
"""

import io
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from clip_deploy.report import Check, Report, Status
from clip_deploy.report.table import table

data = json.loads(Path(sys.argv[1]).read_text("utf-8"))
checks = tuple(Check(**(check | {"status": Status(check["status"])})) for check in data["checks"])
console = Console(record=True, width=112, file=io.StringIO(), force_terminal=True)
console.print(table(Report(data["title"], data["facts"], checks)))
console.save_svg(
    str(Path(__file__).with_name("smoke-test.svg")),
    title="clip-deploy smoke-test model_repository",
    theme=MONOKAI,
)
