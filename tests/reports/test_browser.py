"""report.html in a real browser: quiet, alone, readable on any screen, usable by keyboard.

Skipped where no Chromium is installed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runbook.engine.derive import render
from tests.reports.browser import MISSING, Browser, chromium, running
from tests.reports.samples import SAMPLES
from tests.shared import once

DESK = {"width": 1400, "height": 900}
PHONE = {"width": 420, "height": 900}
# WCAG 2.2 AA for text of this size; what is larger needs less, and is held to the same.
CONTRAST = 4.5

SCRIPT = Path(__file__).with_name("page.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = chromium()
    if program is None:
        pytest.skip(MISSING)
    with running(program) as one:
        yield one


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    def make(folder: Path) -> dict[str, Path]:
        found = {}
        for name, sample in SAMPLES.items():
            found[name] = folder / f"{name}.html"
            found[name].write_text(render(sample(), "html"), encoding="utf-8")
        return found

    return once(tmp_path_factory, "pages-in-a-browser", make)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", SAMPLES)
def test_a_page_is_quiet_alone_readable_and_fits(
    browser: Browser, pages: dict[str, Path], name: str, dark: bool
) -> None:
    for size in (DESK, PHONE):
        browser.open(pages[name], **size, dark=dark)
        browser.value('document.querySelectorAll("details").forEach(one => { one.open = true; })')
        assert browser.said() == []
        assert browser.requests() == [pages[name].as_uri()]
        assert browser.value("document.documentElement.scrollWidth") <= size["width"]
        assert browser.value(f"{SCRIPT}; wider()") == []
        assert browser.value(f"{SCRIPT}; faint({CONTRAST})") == []


def test_the_button_copies_the_settings(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["go"], **DESK)
    label = "document.querySelector('button[data-copy=\"exports\"]')"
    browser.value(f"{label}.focus()")
    browser.key(" ", 32)
    until = time.monotonic() + 60
    while browser.value(f"{label}.textContent") == "Copy" and time.monotonic() < until:
        time.sleep(0.02)
    assert browser.value(f"{label}.textContent") == "Copied"
    browser.value('document.body.append(document.createElement("textarea"))')
    browser.value('document.querySelector("textarea").focus()')
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="v", commands=["paste"])
    pasted = browser.value('document.querySelector("textarea").value')
    (line,) = pasted.splitlines()
    assert {"export", "NSA_DDP_BUCKET_MB=50"} <= set(line.split())


def test_without_its_script_the_page_only_lacks_the_buttons(
    browser: Browser, pages: dict[str, Path], tmp_path: Path
) -> None:
    bare = tmp_path / "bare.html"
    text = pages["no_go"].read_text(encoding="utf-8")
    bare.write_text(re.sub("<script>.*</script>", "", text, flags=re.DOTALL), encoding="utf-8")
    browser.open(bare, **DESK)
    visible = '[...document.querySelectorAll("button")].filter(one => one.checkVisibility()).length'
    assert browser.value(visible) == 0
    assert browser.value(f"{SCRIPT}; below()") == []
    browser.open(pages["no_go"], **DESK)
    assert browser.value(visible) > 0


def test_a_script_that_is_not_ours_does_not_run(
    browser: Browser, pages: dict[str, Path], tmp_path: Path
) -> None:
    """The policy of the page is in force; and the browser does complain when there is a reason."""
    foreign = tmp_path / "foreign.html"
    text = pages["go"].read_text(encoding="utf-8")
    foreign.write_text(
        text.replace("</main>", "<script>document.title = 'x'</script></main>"), encoding="utf-8"
    )
    browser.open(foreign, **DESK)
    assert browser.value("document.title") != "x"
    assert any("Content Security Policy" in said for said in browser.said())
