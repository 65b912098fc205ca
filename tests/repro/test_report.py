"""The report as data."""

import pandas as pd
import pytest

from repro.report import Report, Verdict

ROWS = [{"expert": 0, "truth": 3}, {"expert": 1, "truth": None}]
REPORT = Report(
    "repro",
    {"tokens": [20]},
    {"device": "cpu"},
    (),
    {"expert_counts": ROWS},
    "expert_counts",
    Verdict("ok", 0),
)


def test_a_table_is_a_data_frame_with_a_column_a_key():
    expected = pd.DataFrame({"expert": [0, 1], "truth": [3.0, None]})
    pd.testing.assert_frame_equal(REPORT.frame("expert_counts"), expected)


def test_a_table_that_the_report_has_not_is_a_key_error():
    with pytest.raises(KeyError, match="local_counts"):
        REPORT.frame("local_counts")


def test_the_document_has_every_key_and_no_views():
    assert REPORT.to_dict() == {
        "schema_version": 1,
        "command": "repro",
        "scenario": {"tokens": [20]},
        "environment": {"device": "cpu"},
        "findings": [],
        "tables": {"expert_counts": ROWS},
        "verdict": {"status": "ok", "exit_code": 0, "summary": "", "lines": (), "not_checked": ()},
    }
