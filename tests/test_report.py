from __future__ import annotations

import io
import json
import re
from xml.etree import ElementTree

import pytest
from rich.console import Console

from clip_deploy.report import Check, Report, Status
from clip_deploy.report.junit import junit
from clip_deploy.report.markdown import markdown
from clip_deploy.report.table import table

REPORT = Report(
    "smoke test",
    {"server": "Triton 2.51.0 at 127.0.0.1:8001"},
    (
        Check("the expected server answers", Status.PASSED, "id x", seconds=0.25),
        Check(
            "batches form",
            Status.FAILED,
            "100 requests in 100 batches [red]",
            "m",
            "raise the delay",
            {"histogram": {"1": 100}},
        ),
        Check(
            "photographs find their captions", Status.SKIPPED, "random weights find nothing", "m"
        ),
    ),
)


def _printed(report: Report, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width, no_color=True).print(table(report))
    return out.getvalue()


def test_the_table_says_everything_that_matters():
    text = _printed(REPORT)
    assert "✓ the expected server answers" in text
    assert "✗ batches form" in text
    assert "100 batches [red]" in text, "square brackets are text, not markup"
    assert "skipped: random weights find nothing" in text
    assert "smoke test: 1 passed, 1 failed, 1 skipped" in text
    assert "✗ batches form → raise the delay" in text


def test_the_table_fits_a_terminal_of_eighty_columns():
    assert max(len(line) for line in _printed(REPORT, 80).splitlines()) <= 80


def test_json_carries_figures_and_verdict():
    data = json.loads(json.dumps(REPORT.to_json()))
    assert data["ok"] is False
    assert data["checks"][1]["status"] == "failed"
    assert data["checks"][1]["data"]["histogram"] == {"1": 100}


def test_junit_counts_failures_and_skips_apart():
    suite = ElementTree.fromstring(junit(REPORT)).find("testsuite")
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")
    cases = suite.findall("testcase")
    assert [[child.tag for child in case] for case in cases] == [
        ["system-out"],
        ["properties", "failure"],
        ["skipped"],
    ]
    assert cases[1].find("failure").text.endswith("raise the delay")


def test_junit_survives_what_xml_forbids():
    report = Report(
        "t", {}, (Check("c", Status.FAILED, "log: \x00\x1b[31m\ud800", remedy="<fix> & run"),)
    )
    assert ElementTree.fromstring(junit(report)) is not None


@pytest.mark.parametrize(
    ("statuses", "ok"),
    [
        ([], False),
        ([Status.SKIPPED], False),
        ([Status.PASSED, Status.SKIPPED], True),
        ([Status.PASSED, Status.FAILED], False),
    ],
)
def test_a_report_is_good_when_something_passed_and_nothing_failed(
    statuses: list[Status], ok: bool
):
    assert Report("t", {}, tuple(Check("c", status, "") for status in statuses)).ok is ok


def test_several_reports_become_suites_of_one_file():
    suites = ElementTree.fromstring(junit(REPORT, REPORT)).findall("testsuite")
    assert [suite.get("failures") for suite in suites] == ["1", "1"]


def test_a_report_comes_back_from_its_json():
    assert Report.from_json(json.loads(json.dumps(REPORT.to_json()))) == REPORT


def test_markdown_says_what_failed_and_what_was_skipped():
    text = markdown([REPORT])
    assert text.startswith("## ❌ smoke test: 1 passed, 1 failed, 1 skipped\n")
    assert (
        "| ➖ | m: photographs find their captions |  | skipped: random weights find nothing |"
        in text
    )
    assert "- **batches form**: raise the delay" in text


def test_markdown_shows_hostile_text_as_it_is():
    name = "<img src=x onerror=alert(1)> | a\n| b `c` [d](e) **f**"
    report = Report(name, {name: name}, (Check(name, Status.FAILED, name * 20, name, name),))
    for text in (markdown([report]), markdown([report], folded=[name])):
        assert not re.search(r"(?<!\\)<img", text)
        rows = [line for line in text.splitlines() if line.startswith("| ❌")]
        assert len(rows) == 1
        assert len(re.findall(r"(?<!\\)\|", rows[0])) == 5
        assert "…" in rows[0]
