"""Reports as JUnit XML, which every CI system shows as a list of tests."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from clip_deploy.report import Status

if TYPE_CHECKING:
    from clip_deploy.report import Check, Report

# XML 1.0 has no way to write these, and a log line may hold them.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(*reports: Report) -> str:
    """The XML text: a suite per report, one test case per check, figures as properties."""
    root = ElementTree.Element("testsuites")
    for report in reports:
        root.append(_suite(report))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _suite(report: Report) -> ElementTree.Element:
    suite = ElementTree.Element(
        "testsuite",
        name=_clean(report.title),
        tests=str(len(report.checks)),
        failures=str(len(report.failed)),
        errors="0",
        skipped=str(len(report.with_status(Status.SKIPPED))),
        time=f"{sum(check.seconds for check in report.checks):.3f}",
    )
    properties = ElementTree.SubElement(suite, "properties")
    for key, value in report.facts.items():
        ElementTree.SubElement(properties, "property", name=key, value=_clean(value))
    for check in report.checks:
        _add_case(suite, check, report.title)
    return suite


def _add_case(suite: ElementTree.Element, check: Check, title: str) -> None:
    name = f"{title}.{check.model or 'server'}"
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=_clean(name),
        name=_clean(check.name),
        time=f"{check.seconds:.3f}",
    )
    if check.data:
        properties = ElementTree.SubElement(case, "properties")
        for key, value in check.data.items():
            ElementTree.SubElement(
                properties, "property", name=key, value=_clean(json.dumps(value))
            )
    if check.status is Status.FAILED:
        failure = ElementTree.SubElement(case, "failure", message=_clean(check.figure))
        failure.text = _clean(f"{check.figure}\n{check.remedy}")
    elif check.status is Status.SKIPPED:
        ElementTree.SubElement(case, "skipped", message=_clean(check.figure))
    else:
        ElementTree.SubElement(case, "system-out").text = _clean(check.figure)


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)
