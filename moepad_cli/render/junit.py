"""JUnit XML: a test case for each fault and DP rank, or for each case of a suite; one for the verdict, one for
each thing not checked.

A finding that counts against the verdict fails its case. Others, such as those before a fix, are its output.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moepad_cli.render.text import finding_line
from repro.findings import Finding
from repro.report import Report

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element


def render(report: Report) -> str:
    from xml.etree import ElementTree

    suite = ElementTree.Element("testsuite", name=_legal(f"moepad {report.command}"))
    blamed = _by_case(report.blamed)
    unverified = _unverified(report)
    for (fault, name), findings in _cases(report).items():
        classname = ".".join(part for part in ("moepad", report.command, fault) if part)
        case = _add(suite, "testcase", classname=classname, name=name)
        if failing := blamed.get((fault, name), []):
            first = failing[0]
            failure = _add(
                case, "failure", type=first.code, message=f"{first.code} {first.name}: {first.message}"
            )
            failure.text = _lines(failing)
        elif reason := unverified.get(name):
            _add(case, "error", type="not verified", message=reason)
        if rest := [finding for finding in findings if finding not in failing]:
            _add(case, "system-out").text = _lines(rest)
    _add_verdict(suite, report)
    for tag, attribute in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(attribute, str(len(suite.findall(f"testcase/{tag}"))))
    suite.set("tests", str(len(suite.findall("testcase"))))
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    return f"<?xml version='1.0' encoding='UTF-8'?>\n{ElementTree.tostring(suites, encoding='unicode')}\n"


def _cases(report: Report) -> dict[tuple[str, str], list[Finding]]:
    """Findings by ``(fault, name)`` of what was run, also where there are none."""
    cases: dict[tuple[str, str], list[Finding]] = {}
    for table, rows in report.tables.items():
        for row in rows:
            fault = str(row.get("fault", ""))
            if table == "cases":
                cases.setdefault((fault, str(row["case"])), [])
            elif isinstance(dp_rank := row.get("dp_rank"), int) and not row.get("case"):
                cases.setdefault((fault, f"DP {dp_rank}"), [])
    return cases | _by_case(report.findings)


def _by_case(findings: Sequence[Finding]) -> dict[tuple[str, str], list[Finding]]:
    cases: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        rank = "all ranks" if finding.dp_rank is None else f"DP {finding.dp_rank}"
        cases.setdefault((finding.fault, finding.case or rank), []).append(finding)
    return cases


def _unverified(report: Report) -> dict[str, str]:
    """Why a case of a suite could not be verified, on the side that counts."""
    return {
        str(row["case"]): str(row.get("why", row.get("why_after")) or row.get("why_before"))
        for row in report.tables.get("cases", ())
        if "not verified" in (row.get("verdict"), row.get("before"), row.get("after"))
    }


def _add_verdict(suite: Element, report: Report) -> None:
    classname = f"moepad.{report.command}"
    case = _add(suite, "testcase", classname=classname, name="verdict")
    text = "\n".join(report.verdict.lines)
    if report.verdict.status == "findings":
        _add(case, "failure", type="verdict", message=report.verdict.summary).text = _legal(text)
    elif report.verdict.status == "not-verified":
        _add(case, "error", type="verdict", message=report.verdict.summary).text = _legal(text)
    elif text:
        _add(case, "system-out").text = _legal(text)
    for number, reason in enumerate(report.verdict.not_checked, 1):
        _add(
            _add(suite, "testcase", classname=classname, name=f"not checked {number}"),
            "skipped",
            message=reason,
        )


def _add(parent: Element, tag: str, **attributes: str) -> Element:
    from xml.etree import ElementTree

    return ElementTree.SubElement(parent, tag, {name: _legal(value) for name, value in attributes.items()})


def _lines(findings: list[Finding]) -> str:
    return _legal("\n".join(finding_line(finding) for finding in findings))


def _legal(text: str) -> str:
    """``text`` without the characters that XML 1.0 cannot hold."""
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "", text)
