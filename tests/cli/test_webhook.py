"""`runbook run --webhook`: refused in time, never part of the verdict, nowhere on disk."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import pytest

from runbook.cli._webhook import tell_webhook, webhook_problems
from runbook.console import Console
from tests.cli.shell import inside, runbook
from tests.reports import samples
from tests.tools.export.server import SECRET, serving


def test_a_bad_address_starts_nothing(tmp_path: Path) -> None:
    ended = inside("run", "--webhook", f"http://example.com/{SECRET}", "--sed", "3", cwd=tmp_path)
    assert ended.code == 2
    assert "--webhook: needs https://HOST/..., or http:// for localhost" in ended.err
    assert "unknown option --sed" in ended.err
    assert SECRET not in ended.err
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_has_nothing_to_send(tmp_path: Path) -> None:
    with serving([200]) as received:
        ended = inside("run", "--dry-run", "--webhook", received.url, cwd=tmp_path)
    assert ended.code == 2
    assert "--dry-run has no verdict to send" in ended.err
    assert received.paths == []


def test_what_was_not_delivered_is_a_warning_even_if_quiet(tmp_path: Path) -> None:
    err = io.StringIO()
    with serving([404]) as received:
        args = argparse.Namespace(webhook=received.url)
        assert webhook_problems(args) == []
        tell_webhook(args, samples.go(), tmp_path, 0, Console(stderr=err, quiet=True))
    assert err.getvalue() == (
        "warning: the verdict was not delivered: http://127.0.0.1/[redacted] answers 404 (1 try)\n"
    )
    assert received.documents[0]["report"] == "", "no report lies there"


def test_nobody_is_told_unasked(tmp_path: Path) -> None:
    args = argparse.Namespace(webhook=None)
    assert webhook_problems(args) == []
    err = io.StringIO()
    tell_webhook(args, samples.go(), tmp_path, 0, Console(stderr=err))
    assert err.getvalue() == ""


@pytest.mark.slow
@pytest.mark.e2e
def test_a_real_run_tells_its_verdict_and_keeps_the_address_secret(tmp_path: Path) -> None:
    words = ("run", "--phase", "v2_parity", "--profile", "cpu", "--out", "runs")
    with serving([500, 200]) as received:
        ended = runbook(*words, "--webhook", received.url, cwd=tmp_path)
    (record_file,) = tmp_path.glob("runs/*/run.json")
    record = json.loads(record_file.read_text())
    sent = received.documents[-1]
    assert len(received.documents) == 2
    assert (sent["run_id"], sent["verdict"]) == (record["run_id"], record["verdict"])
    assert sent["exit_code"] == ended.code != 1
    assert Path(sent["report"]).is_file()
    assert "verdict sent to http://127.0.0.1/[redacted]\n" in ended.err
    assert SECRET not in ended.out + ended.err
    assert record["command"].endswith("--webhook '[redacted]'")
    holding = [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and SECRET.encode() in path.read_bytes()
    ]
    assert holding == []
