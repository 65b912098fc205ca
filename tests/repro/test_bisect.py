"""The search for the version at which the verdict changes, over histories that are made up."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.bisect import BisectResult, CaseVerdicts, bisect_versions
from repro.errors import NotVerifiedError


def search(history: Sequence[CaseVerdicts | None]) -> BisectResult:
    return search_in_order(history)[0]


def search_in_order(history: Sequence[CaseVerdicts | None]) -> tuple[BisectResult, list[int]]:
    """Versions named 0, 1, ..., and in which order they were asked; None is one that has no verdict."""
    order: list[int] = []

    def verdict_of(version: str) -> CaseVerdicts:
        order.append(int(version))
        verdicts = history[int(version)]
        if verdicts is None:
            raise NotVerifiedError(f"{version} is not there")
        return verdicts

    result = bisect_versions([str(number) for number in range(len(history))], verdict_of)
    assert len(order) == len(set(order)), "a version was asked twice"
    assert sorted(map(int, [*result.asked, *result.failed])) == sorted(order)
    return result, order


@st.composite
def one_change(draw: st.DrawFn) -> tuple[int, int, set[int]]:
    """How many versions, the first changed one, and those that have no verdict; the ends have one."""
    number = draw(st.integers(2, 200))
    change = draw(st.integers(1, number - 1))
    skipped = draw(st.sets(st.integers(1, number - 2), max_size=number - 2)) if number > 2 else set()
    return number, change, skipped


@given(one_change())
def test_one_change_is_found_as_closely_as_the_versions_without_a_verdict_allow(
    drawn: tuple[int, int, set[int]],
) -> None:
    number, change, skipped = drawn
    result = search([None if v in skipped else ["bad" if v >= change else "good"] for v in range(number)])
    alike = max(v for v in range(change) if v not in skipped)
    changed = min(v for v in range(change, number) if v not in skipped)
    assert (result.alike, result.changed) == (str(alike), str(changed))
    assert result.suspects == tuple(str(v) for v in range(alike + 1, changed + 1))
    assert str(change) in result.suspects
    loads = len(result.asked) + len(result.failed)
    assert loads <= 2 + math.ceil(math.log2(number - 1)) + len(result.failed)


VERDICT = st.one_of(st.none(), st.tuples(*[st.sampled_from([None, "safe", "PAD001", "PAD002"])] * 3))


@given(st.lists(VERDICT, min_size=2, max_size=40))
def test_whatever_the_history_what_is_said_of_a_version_was_verified_there(
    history: list[CaseVerdicts | None],
) -> None:
    result = search(history)
    good, bad = history[0] or (), history[-1] or ()
    differs = any(old and new and old != new for old, new in zip(good, bad, strict=False))
    assert (result.changed is not None) is differs
    assert (result.alike is not None) is differs
    if result.alike is None or result.changed is None:
        assert (result.suspects, result.moved) == ((), ())
        return
    before, after = result.asked[result.alike], result.asked[result.changed]
    assert result.moved == tuple(c for c in range(3) if good[c] and after[c] and good[c] != after[c])
    assert all(text in (None, old) for text, old in zip(before, good, strict=True) if old)
    assert any(before[case] == good[case] for case in result.moved)
    assert (result.has_changed(result.alike), result.has_changed(result.changed)) == (False, True)
    assert result.suspects[-1] == result.changed
    for version in result.suspects[:-1]:
        assert result.has_changed(version) is None
        assert all(result.asked.get(version, [None] * 3)[case] is None for case in result.moved)
        assert version in result.asked or version in result.failed


@pytest.mark.parametrize(
    ("history", "order"),
    [
        ([["a"], ["b"]], [0, 1]),
        ([["a"], ["a"], ["b"]], [0, 2, 1]),
        ([["a"]] * 6 + [["b"]] * 4, [0, 9, 5, 7, 6]),
        # One without a verdict: its neighbours come next.
        ([["a"]] * 4 + [None] + [["b"]] * 4, [0, 8, 4, 5, 2, 3]),
        ([["a"], None, None, None, ["b"]], [0, 4, 2, 3, 1]),
        # Nothing to compare with: the other end is not asked.
        ([[None], ["b"]], [0]),
        ([None, ["b"]], [0]),
        ([["a"], None, None], [0, 2]),
        ([["a"], ["b"], ["a"]], [0, 2]),
    ],
)
def test_the_ends_are_asked_first_and_then_the_middle_of_what_is_left(
    history: Sequence[CaseVerdicts | None], order: list[int]
) -> None:
    assert search_in_order(history)[1] == order


def test_not_verified_is_no_change() -> None:
    history: list[CaseVerdicts | None] = [["PAD001", None], [None, "safe"], ["PAD001", "PAD002"]]
    result = search(history)
    assert result == BisectResult(
        ("0", "1", "2"), {"0": ("PAD001", None), "2": ("PAD001", "PAD002")}, {}, alike=None, changed=None
    )
    assert result.has_changed("0") is False
    assert result.has_changed("1") is None


def test_a_version_where_no_changing_case_was_verified_is_stepped_over() -> None:
    history: list[CaseVerdicts | None] = [("PAD001", "safe"), (None, "safe"), ("safe", "safe")]
    result = search(history)
    assert result == BisectResult(
        ("0", "1", "2"),
        {"0": ("PAD001", "safe"), "1": (None, "safe"), "2": ("safe", "safe")},
        {},
        alike="0",
        changed="2",
    )
    assert result.suspects == ("1", "2")
    assert result.has_changed("1") is None


def test_one_changing_case_that_was_verified_is_enough_for_a_version_to_be_alike() -> None:
    history: list[CaseVerdicts | None] = [["PAD001", "PAD003"], [None, "PAD003"], ["safe", "safe"]]
    result = search(history)
    assert (result.alike, result.suspects, result.moved) == ("1", ("2",), (0, 1))


def test_a_version_stops_being_alike_where_an_earlier_one_changed_in_other_cases_than_it_verified() -> None:
    history: list[CaseVerdicts | None] = [
        *([("a", "a")] * 4),
        (None, "a"),
        ("b", "a"),
        *([("b", "b")] * 3),
    ]
    result = search(history)
    # 4 is alike by its second case as long as 6 or 8 is the first changed; 5 is told by the first case alone.
    assert (result.alike, result.changed, result.suspects) == ("3", "5", ("4", "5"))
    assert result.has_changed("4") is None


def test_the_reason_of_a_version_without_a_verdict_is_kept() -> None:
    assert search([["a"], None, ["b"]]).failed == {"1": "1 is not there"}
    assert search([["a"], None]).failed == {"1": "1 is not there"}


def test_other_errors_reach_the_caller() -> None:
    def verdict_of(_version: str) -> CaseVerdicts:
        raise KeyError("no verdict")

    with pytest.raises(KeyError, match="no verdict"):
        bisect_versions(["0", "1"], verdict_of)


def test_verdicts_of_another_number_of_cases_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        search([["a", "a"], ["b"]])
