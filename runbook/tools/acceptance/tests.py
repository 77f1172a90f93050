"""Stage `tests`: pytest on the device. Passed only where tests ran, and none was skipped.

    python -m runbook.tools.acceptance.tests --out DIR [--left-s S] [--marked MARK] PYTEST_WORDS...

--marked runs the tests with this marker of the files of tests/ and nsa/tests/ that name it; the
others need not even be imported, for which a device may lack a package.

Each test's end is a line in tests.jsonl at once (`recorder`), so that a cut loses none; the next
part runs those only that have not passed. junit_1.xml and so on are pytest's own words.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from runbook.tools.acceptance.program import Program, markdown_table, read_lines
from runbook.tools.acceptance.stages import TO_BE_CONTINUED

TESTS_JSONL = "tests.jsonl"
TESTS_VARIABLE = "RUNBOOK_ACCEPTANCE_TESTS"
_TERM_GRACE_S = 5.0
_NO_TESTS = 5


def pytest_words(words: Sequence[str], out: Path) -> list[str]:
    """The command; nothing of it writes into the checkout."""
    number = len(list(out.glob("junit_*.xml"))) + 1
    return [
        *(sys.executable, "-m", "pytest", "-p", "runbook.tools.acceptance.recorder"),
        *("-p", "no:cacheprovider", "--junitxml", str(out / f"junit_{number}.xml")),
        *words,
    ]


def marked_words(mark: str, checkout: Path) -> list[str]:
    """The words that run the marked tests; empty if no file names the marker."""
    if not mark:
        return []
    files = [
        path.relative_to(checkout).as_posix()
        for folder in ("tests", "nsa/tests")
        for path in sorted((checkout / folder).rglob("test_*.py"))
        if re.search(rf"mark\.{re.escape(mark)}\b", path.read_text("utf-8"))
    ]
    return ["-m", mark, *files] if files else []


def last_ends(rows: Sequence[dict[str, object]]) -> dict[str, dict[str, object]]:
    """The newest end of each test."""
    return {str(row["test"]): row for row in rows if "test" in row and "outcome" in row}


def judge(ends: dict[str, dict[str, object]], code: int | None) -> tuple[int, str]:
    """Exit code and sentence. `code` is pytest's own; None if its time was over.

    What did not run has no answer, so that a skip and an empty selection are never passed.
    """
    counts = {
        name: sum(end["outcome"] == name for end in ends.values())
        for name in ("passed", "failed", "skipped")
    }
    text = ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "no test ran"
    if counts["failed"]:
        failed = [name for name, end in ends.items() if end["outcome"] == "failed"]
        return 1, f"{text}: {', '.join(failed[:3])}"
    if code is None:
        return TO_BE_CONTINUED, f"{text} so far"
    if code == _NO_TESTS or not ends:
        return 3, "no test ran"
    if counts["skipped"]:
        reasons = {str(e.get("reason", "")) for e in ends.values() if e["outcome"] == "skipped"}
        return 3, f"{text}, which is not passed: {'; '.join(sorted(reasons))}"
    if code != 0:
        return 1, f"{text}, but pytest ended with {code}"
    return 0, text


def main(argv: Sequence[str]) -> int:
    """0 all ran and passed, 1 one failed, 3 one was skipped or none ran, 75 out of time."""
    program = Program(__doc__)
    program.parser.add_argument("--marked", default="", metavar="MARK")
    args = program.parse(argv)
    words = [*marked_words(args.marked, Path.cwd()), *program.rest]
    if args.marked and not words:
        program.write("no test ran", "no file names the marker\n", {"tests": []})
        return 3
    lines = args.out / TESTS_JSONL
    environment = {**os.environ, TESTS_VARIABLE: str(lines)}
    process = subprocess.Popen(pytest_words(words, args.out), env=environment)
    code: int | None
    try:
        code = process.wait(max(1.0, program.left_s))
    except subprocess.TimeoutExpired:
        code = None
        process.send_signal(signal.SIGINT)  # pytest writes its JUnit then
        try:
            process.wait(_TERM_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    ends = last_ends(read_lines(lines))
    # Tests that passed in an earlier part are deselected, so pytest may have had nothing to do.
    passed_before = bool(ends) and all(end["outcome"] == "passed" for end in ends.values())
    result, text = judge(ends, 0 if code == _NO_TESTS and passed_before else code)
    rows = [
        (name, end["outcome"], f"{float(str(end.get('seconds', 0))):.1f}", end.get("reason", ""))
        for name, end in ends.items()
    ]
    table = markdown_table(("test", "outcome", "seconds", "reason"), rows)
    program.write(text, table, {"tests": list(ends.values()), "pytest": code})
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
