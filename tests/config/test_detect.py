"""Which profile a machine gets, and that the reason is always told."""

from __future__ import annotations

from pathlib import Path

import pytest

from runbook.config import detect_profile, profile_names
from runbook.config.load import profile_for

A100 = "NVIDIA A100 80GB PCIe, 4\n"


@pytest.mark.parametrize(
    ("listing", "profile", "reason"),
    [
        (A100 * 2, "a100x2_pcie4", "2 x NVIDIA A100 80GB PCIe"),
        (A100.replace(", 4", ", 3") * 2, "a100x2_pcie3", "generation 3"),
        (A100 + A100.replace(", 4", ", 3"), "a100x2_pcie3", "generation 3/4"),
        ("NVIDIA H200, 5\n", "h200x1", "1 x NVIDIA H200"),
        (A100, "cpu", "no shipped profile"),
        (A100 * 4, "cpu", "no shipped profile"),
        ("NVIDIA A100-SXM4-80GB, 4\n" * 2, "cpu", "no shipped profile"),
        ("Tesla T4, 3\n", "cpu", "1 x Tesla T4"),
        ("Tesla T4, 3\nNVIDIA H200, 5\n", "cpu", "Tesla T4 + NVIDIA H200"),
        ("", "cpu", "no GPU"),
    ],
)
def test_profile_by_cards(listing: str, profile: str, reason: str) -> None:
    found, why = profile_for(listing)
    assert found == profile and found in profile_names()
    assert reason in why


def fake(folder: Path, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)


def test_the_program_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert detect_profile() == ("cpu", "nvidia-smi is not installed here: no NVIDIA GPU to use")
    fake(tmp_path, "echo 'NVIDIA H200, 5'")
    assert detect_profile() == ("h200x1", "found 1 x NVIDIA H200")
    fake(tmp_path, "echo 'driver mismatch' >&2; exit 9")
    assert detect_profile() == ("cpu", "nvidia-smi ended with 9: driver mismatch")
