"""What the judges say in each test, whole: every number and word, beside what the test asserts.

A test asserts what it is about; a slip anywhere else in the sentence, the number or its sources is
a difference here. `SAID=accept python -m pytest -n0 FILES` takes over what these files, each of
them whole, say now.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path

from phases.kit.finding import Finding
from runbook.records import Check, Measurement

FOLDER = Path(__file__).with_name("accepted")
_ACCEPT = os.environ.get("SAID") == "accept"
_HINT = "wanted? SAID=accept python -m pytest -n0 {}, then git diff"
_PARTS = ("follows", "title", "clue", "nodes", "choice", "confidence", "comparator", "evidence")
# What is less is what sums of another order leave of zero, and differs by the processor, as does
# the sign of a zero in words.
_ROUNDING, _SIGNED_ZERO = 1e-9, re.compile(r"[+-](0\.?0*)(?![\d.])")
_asked: Counter[str] = Counter()
_kept: dict[Path, dict[str, str]] = {}


def hold(answer: Check | Finding | list[str]) -> None:
    """Fail where this test was told something else when it was accepted."""
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0]
    module, _, name = test.partition("::")
    _asked[test] += 1
    place = module.removeprefix("tests/").removesuffix(".py").replace("/", ".")
    key, file = f"{name} {_asked[test]}", FOLDER / f"{place}.json"
    if file not in _kept:
        _kept[file] = json.loads(file.read_text("utf-8")) if file.is_file() and not _ACCEPT else {}
    now = "; ".join(answer) if isinstance(answer, list) else _told(answer)
    if _ACCEPT:
        _kept[file][key] = now
        text = json.dumps(_kept[file], indent=0, sort_keys=True, ensure_ascii=False)
        file.write_text(f"{text}\n", "utf-8")
    else:
        assert now == _kept[file].get(key), _HINT.format(module)


def _told(answer: Check | Finding) -> str:
    parts = {name: getattr(answer, name, None) for name in _PARTS}
    limit = getattr(answer.limit, "value", answer.limit)
    return " | ".join(
        [
            f"{answer.outcome} {answer.code}",
            _SIGNED_ZERO.sub(r"\1", answer.reason),
            *_number(answer.measurement),
            *([f"limit {_plain(limit)}"] if limit is not None else []),
            *(f"{name} {value}" for name, value in parts.items() if value),
        ]
    )


def _number(one: Measurement | None) -> list[str]:
    if one is None:
        return []
    told = {"sd": one.stdev, "in": one.interval, "steps": one.window, "note": one.note}
    return [
        f"{one.name} {_plain(one.value)} {one.unit} n={one.n} of {one.where}",
        *(f"{name} {_plain(value)}" for name, value in told.items() if value),
    ]


def _plain(value: object) -> str:
    if isinstance(value, tuple):
        return " to ".join(map(_plain, value))
    if isinstance(value, float):
        return f"{value:.5g}" if abs(value) > _ROUNDING else "0"
    return str(value)
