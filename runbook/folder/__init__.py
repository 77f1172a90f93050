"""What lies on the disk, of a run and of each launch: its only readers, and the run's writers.

A format is read here and nowhere else, whoever needs it. Readers never raise for what a file
holds; nothing here judges, signals or waits. Each name is spelled here alone; those of the
trainer's own files are in `nsa.contract`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from nsa.contract import SECRET_SHAPES, URL_LOGIN, is_secret_name

RECORD_FILE = "run.json"
EVENTS_FILE = "events.jsonl"
# What a run ends with for now; both list every file with its digest.
ENDS = ("run_finished", "run_interrupted")
MANIFEST_FILE = "MANIFEST.sha256"
ACCEPTED_JSON = "accepted.json"
# What the harness writes into a launch's folder; the trainer's files are in nsa.contract.
LAUNCH_JSON = "launch.json"
RESULT_JSON = "result.json"
CONSOLE_LOG = "console.log"
CONFIG_YAML = "config.yaml"
# Where a run keeps the trainer configs that its launches read; no phase can have this name.
CONFIGS_FOLDER = "trainer-configs"
JUNIT_XML = "junit.xml"
GPU_SAMPLES_CSV = "gpu_samples.csv"
GPU_SAMPLER_TXT = "gpu_sampler.txt"
DEVICES_BEFORE_JSON = "devices_before.json"
DEVICES_AFTER_JSON = "devices_after.json"
NVIDIA_SMI_BEFORE_XML = "nvidia_smi_before.xml"
NVIDIA_SMI_AFTER_XML = "nvidia_smi_after.xml"
CHECKOUT_JSON = "checkout.json"
KERNEL_LOG_JSON = "kernel_log.json"
LOAD_JSON = "load.json"
# What the ranks of a watched launch held besides memory.
RESOURCES_CSV = "resources.csv"
# Of a trainer of one's own: where it writes, when its rows came, and its processes meanwhile.
OWN_FOLDER = "own"
ARRIVALS_CSV = "arrivals.csv"
PROCESSES_CSV = "processes.csv"
INCIDENT_JSON = "incident.json"
ANOMALIES_JSONL = "anomalies.jsonl"
ANOMALY_TYPE = ".anomaly_type"


def run_folders(out: Path) -> list[Path]:
    """The folders of `out` that hold a run or what is left of one, oldest first.

    By name, since an id begins with its UTC time; empty where there is no such folder. A run is its
    owner's: those of other users, in a folder that they share, cannot be looked into.
    """
    left = (RECORD_FILE, EVENTS_FILE, MANIFEST_FILE)
    there = sorted(out.iterdir()) if out.is_dir() else []
    ours = (folder for folder in there if os.access(folder, os.X_OK))
    return [folder for folder in ours if any((folder / name).is_file() for name in left)]


REDACTED = "[redacted]"

# What decides how a training run behaves. Everything else is left out.
_RECORDED_PREFIXES = (
    "NSA_", "RUNBOOK_", "NCCL_", "TORCH", "PYTORCH_", "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_",
    "GLOO_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "UCX_", "FI_", "TRITON_", "SLURM_JOB",
    "SLURM_NODE", "PYTHON",
)  # fmt: skip
# What images of CUDA say of the drivers they accept: pages of it, and the same on every machine.
_LEFT_OUT = frozenset({"NVIDIA_REQUIRE_CUDA"})
_RECORDED_NAMES = frozenset({"CONFIG", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "NO_COLOR"})

_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
)
# `DB_PASSWORD: "..."` in a file, with a value that is written out: it has no dot, bracket or comma,
# as an expression has. Only for diffs; a log may say "token: 12345678" of a tokenizer.
_ASSIGNED = re.compile(
    r"(?P<name>[\w.-]*(?:SECRET|PASSW(?:OR)?D|PASSPHRASE|API_?KEY|ACCESS_?KEY|_TOKEN|AUTH_?KEY"
    r"|PRIVATE_?KEY|CREDENTIAL)[\w.-]*['\"]?\s*(?:=|:)\s*)"
    r"(?P<value>'[^'\n]{6,}'|\"[^\"\n]{6,}\"|[^\s'\"()\[\]{},.]{8,}(?=\s*(?:#.*)?$))",
    re.IGNORECASE | re.MULTILINE,
)
# Shorter values would blank ordinary words and numbers all over a log.
_SHORTEST_VALUE = 6


def redact_text(text: str, environ: Mapping[str, str] | None = None) -> str:
    """The text without private keys, logins in URLs, token shapes and this environment's secrets.

    A secret of the environment is the value of a variable with a secret's name, or the login part
    of a URL in any variable; values under six characters are left alone.
    """
    variables = os.environ if environ is None else environ
    for secret in _secrets_of(variables):
        text = text.replace(secret, REDACTED)
    text = _PRIVATE_KEY.sub(REDACTED, text)
    text = URL_LOGIN.sub(rf"\g<scheme>{REDACTED}@", text)
    return SECRET_SHAPES.sub(REDACTED, text)


def redact_diff(text: str, environ: Mapping[str, str] | None = None) -> str:
    """A diff as `redact_text` leaves it, and without values written out beside a secret's name."""
    return _ASSIGNED.sub(rf"\g<name>{REDACTED}", redact_text(text, environ))


def redact_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """All the variables, with secrets blanked: by name, by shape, and where one repeats another."""
    return {
        name: REDACTED if is_secret_name(name) else redact_text(value, variables)
        for name, value in variables.items()
    }


def recorded_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that decide how training behaves, sorted, with secrets blanked."""
    variables = os.environ if environ is None else environ
    blanked = redact_variables(variables)
    return {
        name: blanked[name]
        for name in sorted(blanked)
        if (name.startswith(_RECORDED_PREFIXES) and name not in _LEFT_OUT)
        or name in _RECORDED_NAMES
    }


def _secrets_of(environ: Mapping[str, str]) -> list[str]:
    found: set[str] = set()
    for name, value in environ.items():
        if is_secret_name(name):
            # A value of several lines may be quoted line by line.
            found.update({value.strip(), *value.split()})
        found.update(login for match in URL_LOGIN.finditer(value) if (login := _login(match)))
    # Longest first, so that no part of a longer secret is left standing.
    return sorted((text for text in found if len(text) >= _SHORTEST_VALUE), key=len, reverse=True)


def _login(match: re.Match[str]) -> str:
    login = match.group().removeprefix(match.group("scheme")).removesuffix("@")
    return login.partition(":")[2] or login
