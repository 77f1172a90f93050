"""The verdict reaches a real server or becomes a short complaint; the address stays secret."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from runbook.errors import UsageError
from runbook.tools.export.webhook import (
    PAUSES_S,
    TIMEOUT_S,
    Webhook,
    blanked,
    send,
    verdict_document,
    webhook_of,
)
from tests.reports import samples
from tests.shared import crowded
from tests.tools.export.server import DRIP, HANG, SECRET, Received, serving

SOON = (0.01, 0.01)


def posted(received: Received, *, timeout_s: float = 5.0) -> str:
    return send(webhook_of(received.url), {"a": 1}, timeout_s=timeout_s, pauses_s=SOON)


@pytest.mark.parametrize("codes", [[200], [204], [500, 200], [503, 429, 202]])
def test_it_is_delivered_at_the_third_try_at_last(codes: list[int]) -> None:
    with serving(codes) as received:
        assert posted(received) == ""
    assert received.documents == [{"a": 1}] * len(codes)
    assert received.headers[0]["Content-Type"] == "application/json"
    assert set(received.paths) == {f"/hooks/{SECRET}"}


@pytest.mark.parametrize(("code", "tries"), [(500, 3), (404, 1), (401, 1), (302, 1), (307, 1)])
def test_what_a_server_refuses_is_said_without_the_address(code: int, tries: int) -> None:
    with serving([code]) as received:
        said = posted(received)
    count = "1 try" if tries == 1 else f"{tries} tries"
    assert said == f"http://127.0.0.1/[redacted] answers {code} ({count})"
    assert len(received.paths) == tries
    assert all(path == f"/hooks/{SECRET}" for path in received.paths), "redirects are not followed"


@pytest.mark.parametrize("answer", [HANG, DRIP])
def test_a_server_that_hangs_costs_no_more_than_its_time(answer: int) -> None:
    with serving([answer]) as received:
        began = time.monotonic()
        said = posted(received, timeout_s=0.3)
        took = time.monotonic() - began
    assert SECRET not in said and said.startswith("http://127.0.0.1/[redacted] ")
    assert took < crowded(3)


def test_a_server_that_is_not_there() -> None:
    with serving([200]) as received:
        pass
    said = posted(received)
    assert said.endswith("cannot be reached: ConnectionRefusedError: Connection refused (3 tries)")
    assert SECRET not in said and received.paths == []


def test_the_promised_times() -> None:
    assert TIMEOUT_S == 10
    assert len(PAUSES_S) == 2


def test_a_proxy_never_gets_what_is_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving([200]) as proxy, serving([200]) as received:
        monkeypatch.setenv("http_proxy", proxy.url.partition("/hooks")[0])
        assert posted(received) == ""
    assert len(received.paths) == 1 and proxy.paths == []


@pytest.mark.parametrize(
    "text",
    [
        f"http://example.com/{SECRET}",
        f"ftp://example.com/{SECRET}",
        f"file:///etc/{SECRET}",
        f"https:///{SECRET}",
        f"https://user:{SECRET}@example.com/x",
        f"https://example.com/a {SECRET}",
        f"https://example.com:port/{SECRET}",
        f"http://localhost.example.com/{SECRET}",
        f"http://127.0.0.1@example.com/{SECRET}",
        SECRET,
        "",
    ],
)
def test_a_bad_address_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        webhook_of(text)
    assert str(caught.value).count("--webhook") >= 1
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["https://example.com/x?y=1", "http://localhost:8/x", "http://[::1]:8/x"]
)
def test_a_good_address_shows_its_host_only(text: str) -> None:
    found = webhook_of(text)
    assert found.url == text
    assert text not in repr(found) and "/x" not in found.shown


def test_an_address_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "hook"
    file.write_text(f"https://example.com/{SECRET}\n# mine\n")
    assert webhook_of(f"@{file}").url == f"https://example.com/{SECRET}"
    with pytest.raises(UsageError, match="cannot be read: FileNotFoundError"):
        webhook_of(f"@{tmp_path}/absent")


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["run", "--webhook", "https://x/y", "--aa"], ["run", "--webhook", "[redacted]", "--aa"]),
        (["run", "--webhook=https://x/y"], ["run", "--webhook=[redacted]"]),
        (["--webhook", "@hook", "--webhook=@h"], ["--webhook", "@hook", "--webhook=@h"]),
        (["run", "--webhook"], ["run", "--webhook"]),
    ],
)  # fmt: skip
def test_a_command_line_is_recorded_without_the_address(words: list[str], kept: list[str]) -> None:
    assert blanked(words) == kept


def test_the_document_has_verdict_reasons_report_and_numbers() -> None:
    record = samples.no_go()
    told = verdict_document(record, Path("artifacts/x"), 1, "report.html")
    assert told["verdict"] == "NO-GO" and told["exit_code"] == 1
    assert told["headline"] == record.headline
    assert told["reasons"] == list(record.reasons)
    assert told["report"] == "artifacts/x/report.html"
    assert told["checks"] == {"PASS": 2, "FAIL": 1, "INCONCLUSIVE": 1, "SKIPPED": 1}
    (first, *_) = json.loads(json.dumps(told))["numbers"]
    assert first == {
        "name": "baseline.throughput", "value": 23.0, "unit": "tok/s", "n": 3, "outcome": "FAIL",
    }  # fmt: skip


def test_no_secret_of_the_environment_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "abcdefghijkl")
    monkeypatch.setenv("HARMLESS", "a-value-of-the-environment")
    record = samples.no_go().model_copy(update={"reasons": ("crash: login abcdefghijkl refused",)})
    text = json.dumps(verdict_document(record, Path("x"), 1))
    assert "abcdefghijkl" not in text and "login [redacted] refused" in text
    assert "a-value-of-the-environment" not in text


def test_what_json_has_no_number_for_is_a_word() -> None:
    bad = samples.throughput(math.nan, samples.Outcome.FAIL, samples.Reason.NON_FINITE, "NaN")
    record = samples.run(samples.Verdict.NO_GO, (samples.baseline(bad),))
    text = json.dumps(verdict_document(record, Path("x"), 1), allow_nan=False)
    assert json.loads(text)["numbers"][0]["value"] == "NaN"


def test_a_webhook_is_printed_without_its_address() -> None:
    assert SECRET not in repr(Webhook(url=SECRET, shown="https://example.com/[redacted]"))
