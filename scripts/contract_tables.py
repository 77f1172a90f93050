"""Write the tables of the trainer's contract into its page: `python scripts/contract_tables.py`.

Exit codes and columns are declared in `nsa.contract`; what stands between the page's marks is made.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from nsa import contract
from nsa.contract import ExitCode

PAGE = Path(__file__).resolve().parents[1] / "docs/trainer-contract.md"
_MARKED = re.compile(r"(<!-- made: ([\w.]+) -->\n\n).*?(\n<!-- end -->\n)", re.DOTALL)
_FILES = {
    contract.TRAINING_CSV: contract.TRAINING_COLUMNS,
    contract.VAL_CSV: contract.VAL_COLUMNS,
    contract.GATES_CSV: contract.GATES_COLUMNS,
}


def with_tables(page: str) -> str:
    """The page with every marked part made anew. Raises KeyError for a mark of no table."""
    return _MARKED.sub(lambda at: at[1] + "".join(_lines(at[2])) + at[3], page)


def _lines(name: str) -> Iterator[str]:
    if name == "codes":
        yield "| code | meaning |\n|---|---|\n"
        yield from (f"| {int(code)} | {code.meaning} |\n" for code in ExitCode)
        return
    yield f"| `{name}` | meaning |\n|---|---|\n"
    for one in _FILES[name]:
        unit = f" ({one.unit})" if one.unit else ""
        yield f"| `{one.name}` | {one.meaning}{unit} |\n"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text("utf-8")), "utf-8")
