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

BELOW = """(() => [...document.querySelectorAll("header.verdict, .GO ~ .cards #exports, .tile")]
  .map(one => [one.className || one.id, one.getBoundingClientRect().bottom])
  .filter(([name, bottom]) => bottom > innerHeight))()"""
WIDER = """(() => [...document.querySelectorAll("body *")]
  .filter(one => one.getBoundingClientRect().right > innerWidth + 1)
  .filter(one => !one.closest("nav, .scroll, .skip"))
  .map(one => one.outerHTML.slice(0, 80)))()"""
FAINT = """(() => {
  const channels = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const grounds = one => {
    for (; one; one = one.parentElement) {
      const style = getComputedStyle(one);
      if (style.backgroundImage !== "none")
        return [...style.backgroundImage.matchAll(/rgba?\\(([^)]*)\\)/g)].map(m => channels(m[1]));
      const color = channels(style.backgroundColor);
      if (color.length === 3) return [color];
    }
    return [[255, 255, 255]];
  };
  const found = new Set();
  for (const one of document.querySelectorAll("body *")) {
    const speaks = [...one.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    if (!speaks || one.closest("script, style, title, desc")) continue;
    const style = getComputedStyle(one);
    const ink = light(channels(one.closest("svg") ? style.fill : style.color));
    for (const ground of grounds(one).filter(color => color.length === 3)) {
      const [low, high] = [ink, light(ground)].sort((a, b) => a - b);
      const ratio = (high + 0.05) / (low + 0.05);
      if (ratio < LEAST) found.add(`${one.tagName}.${one.className}: ${ratio.toFixed(2)}`);
    }
  }
  return [...found];
})()"""


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
        assert browser.value(WIDER) == []
        assert browser.value(FAINT.replace("LEAST", str(CONTRAST))) == []


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
    assert "export NSA_DDP_BUCKET_MB=50" in pasted.splitlines()


def test_without_its_script_the_page_only_lacks_the_buttons(
    browser: Browser, pages: dict[str, Path], tmp_path: Path
) -> None:
    bare = tmp_path / "bare.html"
    text = pages["no_go"].read_text(encoding="utf-8")
    bare.write_text(re.sub("<script>.*</script>", "", text, flags=re.DOTALL), encoding="utf-8")
    browser.open(bare, **DESK)
    visible = '[...document.querySelectorAll("button")].filter(one => one.checkVisibility()).length'
    assert browser.value(visible) == 0
    assert browser.value(BELOW) == []
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
