"""report.md is short, in a fixed order; no text and no picture breaks a page."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree import ElementTree as ET

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from phases.stage import TrainingStage
from reports.numbers import KEYS, key_numbers
from reports.pages import TABLE_PHASES
from reports.plots import Figure, figures
from reports.text import html_told, markdown_told
from reports.view import build_view
from runbook.config import registry
from runbook.config.load import load_profile, profile_names
from runbook.engine import derive
from runbook.engine.derive import render
from runbook.records import Comparator, Mark, RunRecord, Window
from runbook.records.run import TAKES_OUT
from tests.factory.records import check
from tests.phases import builder
from tests.reports import samples
from tests.reports.browser import MISSING, asked, chromium
from tests.reports.samples import SAMPLES, go, measured, no_go, pictured, series
from tests.tiers import examples

LINES_OF_A_FAILURE = 120


def page_of(record: RunRecord) -> list[str]:
    return render(record, "md").splitlines()


def test_any_number_of_causes_fits() -> None:
    """Causes beyond the first few get a line each, and what is left is counted."""
    check = no_go().phases[1].checks[0]
    told = ({"id": f"baseline.row{n}", "reason": f"it is {n}"} for n in range(60))
    many = tuple(check.model_copy(update=one) for one in told)
    phase = no_go().phases[1].model_copy(update={"checks": many})
    changed = no_go().model_copy(update={"phases": (phase,)})
    causes = len(build_view(changed).causes)
    lines = page_of(changed)
    assert len(lines) <= LINES_OF_A_FAILURE
    left = re.search(r"and (\d+) more causes", "\n".join(lines))
    told = sum(re.match(r"### \d+\. |- FAIL: ", line) is not None for line in lines)
    assert causes == told + (int(left[1]) if left else 0)


def test_every_number_and_table_is_of_a_check_that_there_is() -> None:
    known = {
        check for name in profile_names() for check in registry.known_checks(load_profile(name))
    }
    where = builder.on_nodes(4)
    known |= {check for phase in registry.phases().values() for check in phase.check_ids(where)}
    known |= {f"production.{what}" for what in TrainingStage.known_checks()}
    assert {key.check for key in KEYS} <= known
    assert set(TABLE_PHASES) <= set(registry.phases())


def planned_launch() -> RunRecord:
    """A launch by a plan: its own phase `smoke` has throughput, gates and the selection."""
    record, phase = go(), no_go().phases[1]
    rate = phase.checks[0].model_copy(update={"id": "smoke.throughput", "phase": "smoke"})
    entropy = measured(0.99, "", "smoke/run/gates.csv", name="gate_entropy_min")
    gates = rate.model_copy(update={"id": "smoke.gates", "measurement": entropy})
    selection = (
        measured(12.25, "blocks", "smoke/run/gates.csv", name="sel_blocks_mean", n=15),
        measured(0.25, "share", "smoke/run/gates.csv", name="sel_forced_share", n=15),
    )
    smoke = phase.model_copy(
        update={"name": "smoke", "checks": (rate, gates), "measurements": selection}
    )
    document = {**record.profile_document, "phases": {"smoke": {"stage": {"order": 1}}}}
    return record.model_copy(update={"phases": (smoke,), "profile_document": document})


def test_a_launch_by_a_plan_has_its_own_numbers_and_the_health_of_the_selection() -> None:
    """Requirement G10; a number that decides nothing says so."""
    record = planned_launch()
    found = {one.label: one for one in key_numbers(record)}
    assert found["Throughput"].id == "smoke.throughput" and found["Throughput"].limit
    blocks, forced = found["Blocks that a query attends to"], found["Forced part of these blocks"]
    assert (blocks.value, blocks.limit, blocks.gated) == ("12.25 blocks", "", False)
    assert not blocks.fails and found["Throughput"].fails
    assert forced.value == "25 %"
    assert "| Blocks that a query attends to | 12.25 blocks | - | - | not gated |" in render(
        record, "md"
    )


# Strings out of logs and configs must never act as markup, as escapes or as new lines.

NASTY = [
    "a|b||c \\| d",
    "`x` ``y`` ```\n# heading\n```",
    "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "line one\n\n# line two\n| a | b |\n|---|---|",
    "\x1b[2J\x1b[31mred\x07\x00\x9b1m",
    "a\u202eb\u200bc\ufeff\u2028d",
    "[click](javascript:alert(1)) ![x](http://x) *b* __c__ ~~d~~ &lt; &#60;",
    "{{ 7 * 7 }} {% include 'x' %} ]]> --> \"' onload=\"x",
    "\\",
    "ends with backtick `",
]
OWN_PAGES = {"report.md", "details.md", "report.html", "nodes.json"}
# Words that the record's own rules or the reports' structure depend on.
FIXED = {"id", "phase", "outcome", "code", "verdict", "comparator", "kind", "status", "sha256"}
FIXED |= {"profile_sha256", "required", "name", "schema_version", "run_dir"}
# The steps of the playbook, with code between backticks.
FIXED |= {"remedy", "remedies"}


def spoil(node: Any, text: str, key: str = "") -> Any:
    """The same document with every free string replaced."""
    if isinstance(node, dict):
        return {name: spoil(value, text, name) for name, value in node.items()}
    if isinstance(node, list):
        return [spoil(value, text, key) for value in node]
    if isinstance(node, str) and key not in FIXED and node:
        return text
    return node


def spoiled(text: str) -> RunRecord:
    document = spoil(no_go().model_dump(mode="json"), text)
    document["phases"][1]["checks"][0] |= {"nodes": [text], "confidence": "reported"}
    document["environment"][TAKES_OUT] = f"{text} {{node}} {{reason}}"
    return RunRecord.model_validate(document)


def markdown_shape(text: str) -> list[tuple[str, str]]:
    """Block structure as an independent Markdown parser sees it; tables count their cells."""
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    tokens = parser.parse(text)
    for token in tokens:
        for inner in token.children or []:
            assert inner.type in {
                *("text", "code_inline", "strong_open", "strong_close", "text_special"),
                *("softbreak", "link_close"),
            } or (inner.type == "link_open" and inner.attrGet("href") in OWN_PAGES), inner
    return [(token.type, token.tag) for token in tokens if token.type != "inline"]


class TagCounter(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[str, ...]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, tuple(name for name, _ in attrs)))


def html_shape(text: str) -> list[tuple[str, tuple[str, ...]]]:
    counter = TagCounter()
    counter.feed(text)
    return counter.seen


BENIGN = spoiled("word")
SHAPES = {
    "md": markdown_shape(derive.render(BENIGN, "md")),
    "details": markdown_shape(derive.render(BENIGN, "details")),
    "html": html_shape(derive.render(BENIGN, "html")),
    "lines": len(derive.render(BENIGN, "terminal").splitlines()),
    "junit": [node.tag for node in ET.fromstring(derive.render(BENIGN, "junit")).iter()],
}


def assert_neutral(record: RunRecord) -> None:
    texts = {fmt: derive.render(record, fmt) for fmt in registry.names(registry.REPORT_GROUP)}
    for fmt, text in texts.items():
        bad = [c for c in text if (c < " " and c not in "\n\t") or c in "\x7f\x9b\u202e\u200b"]
        assert not bad, (fmt, bad)
    for name in ("md", "details"):
        assert markdown_shape(texts[name]) == SHAPES[name]
    assert html_shape(texts["html"]) == SHAPES["html"]
    assert len(texts["terminal"].splitlines()) == SHAPES["lines"]
    commands = texts["github"].splitlines()
    assert commands and all(line.startswith("::") for line in commands), "no line of its own"
    assert [node.tag for node in ET.fromstring(texts["junit"]).iter()] == SHAPES["junit"]


@pytest.mark.parametrize("text", NASTY)
def test_hostile_text_changes_no_structure(text: str) -> None:
    assert_neutral(spoiled(text))


@examples(60)
@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=30).filter(str.strip))
def test_any_text_changes_no_structure(text: str) -> None:
    assert_neutral(spoiled(text))


@pytest.mark.parametrize("text", [*NASTY, "# a", "a `b", "`a` b `c"])
def test_a_step_is_one_paragraph_whatever_stands_between_its_backticks(text: str) -> None:
    for step in (text, f"read `{text}` first", f"`{text}`{text}"):
        shape = markdown_shape(f"1. {markdown_told(step)}\n")
        assert [tag for _, tag in shape].count("p") == 2 and len(shape) == 6
        assert {tag for tag, _ in html_shape(html_told(step))} <= {"code"}


ANY = st.floats(allow_nan=True, allow_infinity=True)
CLASSES = {
    *("axis", "grid", "curve", "curve-2", "curve-3", "curve-4", "spread", "dot", "limit"),
    *("shade", "shade-warmup", "bar-pass", "bar-fail", "bar-warn", "text"),
}
QUICK = settings(deadline=None, max_examples=60)


def assert_sound(drawn: Sequence[Figure]) -> None:
    """Well-formed, named, without colours of its own, and nothing outside of the picture."""
    for figure in drawn:
        root = ElementTree.fromstring(figure.svg)
        width, height = map(float, root.attrib["viewBox"].split()[2:])
        assert root.get("role") == "img" and root[0].tag == "title" and root.findtext("desc")
        for node in root.iter():
            assert node.tag in {"svg", "title", "desc", "line", "rect", "circle", "path", "text"}
            assert node is root or node.get("class", "axis") in CLASSES
            assert not {"style", "fill", "stroke", "onload"} & set(node.attrib)
            for name, most in {"x": width, "y": height}.items():
                for place in (name, f"{name}1", f"{name}2", f"c{name}"):
                    assert 0 <= float(node.get(place, 0.0)) <= most


@example([5e-324, 5e-324])
@example([1e308, -1e308])
@example([0.0, 1e99])
@example([math.nan])
@QUICK
@given(st.lists(ANY, min_size=1, max_size=30))
def test_any_curve_is_drawn_inside_the_picture_or_not_at_all(ys: list[float]) -> None:
    marks = [Mark(label="limit", value=ys[0])]
    spans = {
        "warmup": Window(first_step=1, last_step=1),
        "window": Window(first_step=1, last_step=9),
    }
    plain = series(ys, limits=marks, name="a")
    panels = [series(ys, name=name, group="g", **spans) for name in "bc"]
    drawn = figures(pictured(curves=[plain, *panels]))
    assert_sound(drawn)
    if sum(abs(y) < 1e100 for y in ys) < 2:
        assert drawn == ()


def test_curves_of_a_group_share_a_picture_and_others_have_their_own() -> None:
    curves = [series([1.0, 2.0], name=name) for name in "ab"]
    curves += [series([1.0, 2.0], name=name, group="g") for name in "cd"]
    assert [one.kind for one in figures(pictured(curves=curves))] == ["trace", "trace", "g"]


@example((math.inf, -math.inf), 5e-324)
@QUICK
@given(st.tuples(ANY, ANY), ANY)
def test_any_interval_is_drawn_inside_the_picture_or_not_at_all(
    interval: tuple[float, float], level: float
) -> None:
    measured = samples.measured(level, "ratio", "phase/run/training.csv", interval=interval)
    limit = {"comparator": Comparator.AT_LEAST, "limit": level, "limit_source": "here"}
    held = check("sweep.x", measurement=measured, **limit)
    assert_sound(figures(pictured(checks=[held])))


DESK, PHONE = 1400, 420
# WCAG 2.2 AA for text of this size; what is larger needs less, and is held to the same.
CONTRAST = 4.5
SCRIPT = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
OPENED = 'document.querySelectorAll("details").forEach(one => { one.open = true; })'


@pytest.mark.skipif(chromium() is None, reason=MISSING)
@pytest.mark.parametrize(
    ("name", "width", "dark"),
    [("go", PHONE, True), ("go", DESK, False), ("no_go", PHONE, False), ("no_go", DESK, True)],
)
def test_a_page_is_readable_fits_and_has_its_buttons(
    tmp_path: Path, name: str, width: int, dark: bool
) -> None:
    page = tmp_path / "report.html"
    page.write_text(render(SAMPLES[name](), "html"), encoding="utf-8")
    question = f"{SCRIPT}; [below(), {OPENED}, seen(), wider(), faint({CONTRAST}), faults()]"
    below, _, (scheme, across, buttons), *found = asked(page, question, width=width, dark=dark)
    assert (scheme, across <= width, buttons > 0) == (dark, True, True)
    assert found == [[], [], []], "what is wider than the screen, too faint, or has no name"
    assert below == [] or width == PHONE
    text = page.read_text("utf-8").replace("<script>", '<script type="text">')
    page.write_text(text.replace('id="phase-2"', "").replace("<h3", "<h4", 1))
    buttons, wrong = asked(page, f"{SCRIPT}; [seen()[2], faults()]", width=width)
    assert buttons == 0, "the script shows the buttons"
    assert "#phase-2 leads nowhere" in wrong and any("heading 4 of" in one for one in wrong)
