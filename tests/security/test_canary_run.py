"""A whole run from a checkout whose diff, and on a machine whose environment, hold secrets."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from runbook.folder.facts import REDACTED

ROOT = Path(__file__).parents[2]
IN_ENVIRONMENT = "canary-env-8d1f6b20"
IN_DIFF = "canary-diff-55e0c7a9"
SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "NCCL_AUTH_TOKEN")


def _checkout(folder: Path) -> Path:
    """A copy of the packages as a checkout of its own, with secrets in what is not committed."""
    unwanted = shutil.ignore_patterns("__pycache__")
    for name in ("nsa", "runbook", "phases", "reports", "configs", "templates"):
        shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "deploy.env").write_text("REGION=north\n")
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    lines = [
        "REGION=north",
        f'DB_PASSWORD="{IN_DIFF}"',
        f"service_api_key: {IN_DIFF}",
        f"the value {IN_ENVIRONMENT} of a variable, quoted in passing",
    ]
    (folder / "deploy.env").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.e2e
@pytest.mark.slow
def test_no_canary_in_any_byte_of_a_run(tmp_path: Path) -> None:
    checkout = _checkout(tmp_path / "checkout")
    target = tmp_path / "elsewhere"
    target.mkdir()
    (tmp_path / "link").symlink_to(target)
    words = ["run", "--profile", "cpu", "--phase", "preflight,single_gpu", "--steps-scale", "0.02"]
    words += ["--protocol", "single"]
    words += ["--out", str(tmp_path / "x" / ".." / "link")]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("NSA_", "RUNBOOK_"))}
    environ = {**kept, **dict.fromkeys(SECRETS, IN_ENVIRONMENT), "OMP_NUM_THREADS": "1"}

    def runbook(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "runbook", *words]
        return subprocess.run(
            command, cwd=checkout, env=environ, capture_output=True, text=True, timeout=240
        )

    done = runbook(*words)
    assert done.returncode in (1, 3), done.stdout + done.stderr
    # Link and dots are resolved before anything is made; `latest` leads to the newest launch.
    (run_root,) = (path for path in target.iterdir() if not path.is_symlink())
    shown = runbook("report", str(run_root), "--format", "details")
    files = [path for path in run_root.rglob("*") if path.is_file()]
    assert {"run.json", "git_diff.patch", "report.html", "training.csv"} <= {p.name for p in files}
    for canary in (IN_ENVIRONMENT, IN_DIFF):
        assert canary not in done.stdout + done.stderr + shown.stdout + shown.stderr
        for path in files:
            assert canary.encode() not in path.read_bytes(), path
    # The planted lines were really in reach: they are there, with their secrets blanked.
    patch = (run_root / "git_diff.patch").read_text()
    assert f"+DB_PASSWORD={REDACTED}" in patch
    assert f"+service_api_key: {REDACTED}" in patch
    assert f"+the value {REDACTED} of a variable" in patch
    record = json.loads((run_root / "run.json").read_text())
    assert str(run_root) == str(run_root.resolve()) and record["phases"]
    for folder in (run_root, *(p for p in run_root.rglob("*") if p.is_dir())):
        assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0, folder
