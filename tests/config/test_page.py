"""The pages made from code: thresholds, and the tables of the contract."""

from __future__ import annotations

from pathlib import Path

from nsa import contract
from scripts import contract_tables
from scripts.thresholds_page import thresholds_page

PAGE = Path(__file__).parents[2] / "docs" / "thresholds.md"


def test_the_page_of_thresholds_is_what_its_script_prints() -> None:
    assert PAGE.read_text(encoding="utf-8") == thresholds_page()


def test_the_contracts_page_has_the_tables_that_its_script_makes() -> None:
    page = contract_tables.PAGE.read_text("utf-8")
    assert contract_tables.with_tables(page) == page
    for columns in (contract.TRAINING_COLUMNS, contract.VAL_COLUMNS, contract.GATES_COLUMNS):
        for column in columns:
            unit = f" ({column.unit})" if column.unit else ""
            assert f"\n| `{column.name}` | {column.meaning}{unit} |" in page, column.name
    for code in contract.ExitCode:
        assert f"\n| {int(code)} | {code.meaning} |" in page


def test_a_table_that_was_edited_by_hand_is_made_anew() -> None:
    page = contract_tables.PAGE.read_text("utf-8")
    edited = page.replace("| `warmup` |", "| `warming` |")
    assert edited != page
    assert contract_tables.with_tables(edited) == page
