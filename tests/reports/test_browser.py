"""report.html in a real browser: readable on any screen, in both color schemes.

Skipped where no Chromium is installed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from runbook.engine.derive import render
from tests.reports.browser import MISSING, asked, chromium
from tests.reports.samples import SAMPLES

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
