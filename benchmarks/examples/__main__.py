"""Make the examples: `python -m benchmarks.examples [--only NAME,...] [--out DIR]`.

Real runs of this machine's CPU that end in every way a reader should have seen: one healthy, the
others with one thing wrong. One after the other, each as a person would start it; then their
reports are copied to DIR/NAME (docs/examples unless --out names another). A run that ends with
another exit code than it should is an error, and its reports are not copied. `--picture FILE` shows
the page of the healthy one as a browser does, from the verdict to what decided it; with `--only ""`
of the page that is there.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.program import markdown_table, names, put_between
from runbook.config.load import load_profile
from runbook.folder import run_folders
from tests.reports.browser import asked, take_picture

ROOT = Path(__file__).resolve().parents[2]
REPORTS = ("report.md", "details.md", "report.html")
BEGIN, END = "<!-- examples: begin -->", "<!-- examples: end -->"


@dataclass(frozen=True, kw_only=True)
class Example:
    """One run. `profile` is what differs from `extends`, or the name of a shipped profile."""

    name: str
    title: str
    wrong: str
    exit_code: int
    profile: str = "cpu"
    changes: dict[str, Any] = field(default_factory=dict)
    gates: Sequence[str] = ()
    arguments: Sequence[str] = ()


EXAMPLES = tuple(
    Example(**item)
    for item in yaml.safe_load(Path(__file__).with_name("examples.yaml").read_text("utf-8"))
)


def main(argv: Sequence[str]) -> int:
    """Make the examples that were asked for; 1 if one did not end as it should."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.examples", description=__doc__)
    known = [example.name for example in EXAMPLES]
    parser.add_argument("--only", type=names, default=known, help="comma-separated names")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "examples")
    parser.add_argument("--picture", type=Path, help="the picture of the README goes here")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.only) - set(known)):
        parser.error(f"--only: no example {', '.join(unknown)}; there are: {', '.join(known)}")
    with tempfile.TemporaryDirectory() as temporary:
        runs = {e.name: make(e, Path(temporary)) for e in EXAMPLES if e.name in args.only}
        # Only now: reports copied in between would be changes of the checkout to the runs after.
        for name, run in runs.items():
            if run is not None:
                copy_reports(run, args.out / name)
    put_between(args.out / "README.md", BEGIN, END, table(args.out))
    if args.picture:
        page = args.out / "go" / "report.html"
        decided = "document.getElementById('decided').getBoundingClientRect().bottom"
        end = int(asked(page, decided, width=1400))
        take_picture(page, args.picture, width=1400, height=end + 16)
    return 0 if all(runs.values()) else 1


def make(example: Example, work: Path) -> Path | None:
    """Run one example below `work`; its run's folder, None if it ended unexpectedly."""
    code = subprocess.run(
        command(example, work),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    ).returncode
    if code != example.exit_code:
        print(f"{example.name}: exit code {code} instead of {example.exit_code}", file=sys.stderr)
        return None
    return run_folders(work / example.name)[-1]


def copy_reports(run: Path, target: Path) -> None:
    """Copy what a run's folder says to a reader, with the same paths wherever it was made."""
    target.mkdir(parents=True, exist_ok=True)
    for name in REPORTS:
        text = (run / name).read_text(encoding="utf-8")
        text = text.replace(str(run.parents[1]), "/tmp/examples").replace(str(ROOT), "/src")
        (target / name).write_text(text, encoding="utf-8")


def command(example: Example, work: Path) -> list[str]:
    """What a person would type, with the profile written where it is needed."""
    profile = example.profile
    if example.changes or example.gates:
        path = work / f"{example.name}.yaml"
        path.write_text(yaml.safe_dump(profile_document(example), sort_keys=False), "utf-8")
        profile = str(path)
    out = work / example.name
    words = [sys.executable, "-m", "runbook", "run", "--profile", profile, "--out", str(out)]
    return [*words, *example.arguments]


def profile_document(example: Example) -> dict[str, object]:
    """The profile as YAML holds it; it requires what its parent does, and the example's gates."""
    parent = load_profile(example.profile)
    document: dict[str, object] = {
        "extends": parent.name,
        "name": f"example_{example.name.replace('-', '_')}",
    }
    document |= {"title": f"{parent.title}; {example.title}", **example.changes}
    if example.gates:
        document["required"] = [*parent.required, *example.gates]
    return document


def table(out: Path) -> str:
    """The examples that are there, for the page between its marks."""
    rows = []
    for example in EXAMPLES:
        folder = out / example.name
        if folder.is_dir():
            links = ", ".join(f"[{name}]({example.name}/{name})" for name in REPORTS)
            report = folder / "report.md"
            told = verdict_line(report), first_cause(report)
            rows.append((example.title, example.wrong, *told, links))
    header = ("run", "what is wrong", "verdict", "first cause in its report", "reports")
    return markdown_table(header, rows).rstrip("\n")


def verdict_line(report: Path) -> str:
    """The verdict as the report says it, without the scope."""
    for line in report.read_text(encoding="utf-8").splitlines():
        if line.startswith("**Verdict: "):
            return line.removeprefix("**Verdict: ").partition(" (")[0].rstrip("*")
    raise ValueError(f"{report} has no verdict")


def first_cause(report: Path) -> str:
    """The report's own words for its first cause; a dash where nothing is wrong."""
    found = re.search(r"^### 1\. (.+)", report.read_text("utf-8"), re.MULTILINE)
    return found[1] if found else "-"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
