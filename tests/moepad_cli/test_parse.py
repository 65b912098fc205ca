"""Texts of options become numbers, or one line that names the option."""

from __future__ import annotations

import pytest

from moepad_cli import parse
from moepad_cli.errors import UsageError


@pytest.mark.parametrize(
    ("text", "number"), [("0", 0), ("7", 7), ("007", 7), ("2147483647", 2**31 - 1), ("0" * 5000 + "9", 9)]
)
def test_digits_are_a_whole_number(text: str, number: int) -> None:
    assert parse.whole_number(text, "--n") == number


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("12x", "'12x' is not a whole number; give e.g. --n 64"),
        ("", "'' is not a whole number; give e.g. --n 64"),
        (" 7 ", "' 7 ' is not a whole number; give e.g. --n 64"),
        ("7\n", "'7\\n' is not a whole number; give e.g. --n 64"),
        ("1.5", "'1.5' is not a whole number; give e.g. --n 64"),
        ("1e3", "'1e3' is not a whole number; give e.g. --n 64"),
        ("1_000", "'1_000' is not a whole number; give e.g. --n 64"),
        ("+5", "'+5' is not a whole number; give e.g. --n 64"),
        ("0x10", "'0x10' is not a whole number; give e.g. --n 64"),
        ("٣", "'٣' is not a whole number; give e.g. --n 64"),
        ("-1", "'-1' is out of range; give 0 to 2147483647"),
        ("2147483648", "'2147483648' is out of range; give 0 to 2147483647"),
        ("9" * 5000, f"'{'9' * 57}...' is out of range; give 0 to 2147483647"),
    ],
)
def test_anything_else_is_not_a_whole_number(text: str, problem: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse.whole_number(text, "--n")
    assert raised.value.message == f"--n: {problem}"


def test_a_list_is_whole_numbers_with_commas() -> None:
    assert parse.whole_numbers("16,32,64", "--n") == (16, 32, 64)


@pytest.mark.parametrize("text", ["", "1,,2", "1,", ",1"])
def test_a_list_has_no_empty_item(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--n: '.*' has an empty item; give whole numbers with commas"):
        parse.whole_numbers(text, "--n")


def test_a_wrong_item_of_a_list_is_the_one_that_is_told() -> None:
    with pytest.raises(UsageError) as raised:
        parse.whole_numbers("16, 32", "--n")
    assert raised.value.message == "--n: ' 32' is not a whole number; give e.g. --n 16,32,64"


@pytest.mark.parametrize(("text", "number"), [("2", 2.0), ("1.25", 1.25)])
def test_a_decimal_has_digits_and_a_point(text: str, number: float) -> None:
    assert parse.decimal(text, "--x", least=1, example=2) == number


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nan", "'nan' is not a number; give e.g. --x 2"),
        ("inf", "'inf' is not a number; give e.g. --x 2"),
        ("1e3", "'1e3' is not a number; give e.g. --x 2"),
        ("1.", "'1.' is not a number; give e.g. --x 2"),
        ("0.5", "'0.5' is out of range; give 1 or more"),
        ("-2", "'-2' is out of range; give 1 or more"),
        ("9" * 400, f"'{'9' * 57}...' is out of range; give 1 or more"),
    ],
)
def test_anything_else_is_not_a_decimal(text: str, problem: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse.decimal(text, "--x", least=1, example=2)
    assert raised.value.message == f"--x: {problem}"


def test_a_choice_that_is_close_is_suggested() -> None:
    assert parse.choice("csv", "--format", ("table", "csv")) == "csv"
    with pytest.raises(UsageError) as raised:
        parse.choice("tabel", "--format", ("table", "csv"))
    assert raised.value.message == "--format: 'tabel' is not one of table, csv; did you mean table?"
