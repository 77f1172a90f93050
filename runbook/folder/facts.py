"""Facts: what was found out about the machine, and in what two launches or documents differ.

`facts.json` has what preflight found; a fact is a draft until its file is whole. `accepted.json` of
a phase keeps what earlier accepted runs measured there. The engine writes it when the phase's
launches have ended. A run is judged, and judged again, from this file alone, wherever its folder
lies by then and whatever became of the earlier runs. Secrets are kept out of it, and of every other
artifact: here is what may be recorded of an environment, and what is blanked.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from nsa.contract import ENV_JSON, SECRET_SHAPES, URL_LOGIN, is_secret_name
from nsa.contract.digests import sha256_of
from nsa.toggles import PREFIX
from runbook.errors import RunbookError
from runbook.files import read_bytes, write_atomic
from runbook.folder import ACCEPTED_JSON, DEVICES_BEFORE_JSON
from runbook.folder.launch.documents import json_object, read_json_object
from runbook.records.evidence import AcceptedRuns, Fact
from runbook.records.measurement import first_problem

FACTS_FILE = "facts.json"
_FACTS = TypeAdapter(dict[str, Fact], config=ConfigDict(extra="forbid"))


def finish(drafts: Sequence[Fact], run_root: Path) -> dict[str, Fact]:
    """Facts with the digest of the file that holds them, which is whole now.

    Raises RuntimeError for a name that occurs twice, or a missing value without its reason.
    """
    facts = {draft.name: draft for draft in drafts}
    if len(facts) < len(drafts):
        raise RuntimeError(f"two facts have one name among {', '.join(one.name for one in drafts)}")
    for draft in drafts:
        if draft.value is None and not draft.note:
            raise RuntimeError(f"fact {draft.name} has no value and no note that says why")
    digests = {path: sha256_of(run_root / path) for path in {draft.path for draft in drafts}}
    return {name: replace(one, sha256=digests[one.path]) for name, one in facts.items()}


def write_facts(run_root: Path, facts: Mapping[str, Fact]) -> None:
    """Keep what was found out about the machine, for judging again."""
    document = {name: asdict(fact) for name, fact in facts.items()}
    write_atomic(run_root / FACTS_FILE, json.dumps(document, indent=2) + "\n")


def read_facts(run_root: Path) -> dict[str, Fact]:
    """The facts of a run; none if preflight did not run. Raises `RunbookError` if damaged."""
    path = run_root / FACTS_FILE
    if not path.is_file():
        return {}
    try:
        return _FACTS.validate_json(read_bytes(path), strict=True)
    except ValidationError as error:
        raise RunbookError(f"{path} is damaged: {first_problem(error)}") from error


def shown_fact(fact: Fact) -> str:
    """A fact as the record's environment shows it; empty where nothing is known."""
    if fact.value in (None, ""):
        return ""
    value = f"{fact.value:.6g}" if isinstance(fact.value, float) else str(fact.value)
    return f"{value} {fact.unit}".strip()


# What something is, by its kind and its name.
Facts = dict[tuple[str, str], str]

_KINDS = {"git": "code", "versions": "software", "device": "machine"}
_CARDS = ("device", "uuids")
_WORK = ("seq_len", "global_batch", "accumulation", "dtype", "attention_path", "steps")
# Of another kind than these are differences that a comparison names and is still made with.
_SAME = ("work", "toggles", "machine")


def env_facts(env: Mapping[str, Any]) -> Facts:
    """Code, software, machine, work and toggles of a launch, as text."""
    facts: Facts = {}
    for name, kind in _KINDS.items():
        # The branch is only a name for the commit.
        inner = {key: v for key, v in (env.get(name) or {}).items() if key != "branch"}
        # Another card of the same model is no other machine: it may be slower, and that is to show.
        facts |= {
            ("cards" if (name, key) == _CARDS else kind, f"{name}.{key}"): str(value)
            for key, value in inner.items()
        }
    work = ((env, ("world_size", "config_sha256")), (env.get("effective") or {}, _WORK))
    for source, names in work:
        facts |= {("work", name): str(source[name]) for name in names if name in source}
    toggles = (toggle for toggle in env.get("toggles") or () if "name" in toggle)
    return facts | {
        ("toggles", f"toggle {toggle['name']}"): str(toggle.get("value")) for toggle in toggles
    }


def variable_facts(planned: Mapping[str, str]) -> Facts:
    """The variables of a planned launch that are no toggles, such as NCCL's."""
    return {
        ("toggles", f"variable {name}"): value
        for name, value in planned.items()
        if not name.startswith(PREFIX)
    }


def device_facts(devices: Mapping[str, Any] | None) -> Facts:
    """The cards of a launch and their driver, by its devices_before.json."""
    found = devices or {}
    uuids = sorted(gpu["uuid"] for gpu in found.get("gpus") or () if gpu.get("uuid"))
    facts = {("cards", "GPU UUIDs"): ", ".join(uuids), ("software", "driver"): found.get("driver")}
    return {name: text for name, text in facts.items() if text}


def launch_facts(folder: Path) -> Facts | None:
    """What the launch in this folder ran on and with; None without an env.json that can be read."""
    env = json_object(folder / ENV_JSON, shape="env")
    devices = json_object(folder / DEVICES_BEFORE_JSON, shape="devices_before")
    return env_facts(env) | device_facts(devices) if env else None


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Something that is not the same on both sides.

    `kind` groups what changes together: code, machine, cards, software, work (profile, config, data
    shapes), toggles or harness. Numbers may be compared only if one kind differs, and not work.
    """

    kind: str
    what: str
    a: str
    b: str


def unlike(a: Facts, b: Facts, *, absent: str = "absent") -> list[Difference]:
    """What differs, with its text on both sides (`absent` where it has none)."""
    values = {fact: (a.get(fact, absent), b.get(fact, absent)) for fact in {**a, **b}}
    return [
        Difference(kind=kind, what=what, a=left, b=right)
        for (kind, what), (left, right) in values.items()
        if left != right
    ]


def other_work(a: Facts, b: Facts) -> list[Difference]:
    """What differs in work, toggles and machine: then no comparison is made at all."""
    return [one for one in unlike(a, b) if one.kind in _SAME]


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Every value that two documents have otherwise, by its dotted key; None where one has none.

    Values are the same where JSON has the same words for them: no NaN equals itself.
    """
    for name in sorted(one.keys() | other.keys()):
        mine, theirs = one.get(name), other.get(name)
        if json.dumps(mine, sort_keys=True) == json.dumps(theirs, sort_keys=True):
            continue
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            yield from differences(mine, theirs, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", mine, theirs


def read_accepted(run_root: Path, phase: str) -> AcceptedRuns | None:
    """The earlier runs that the phase kept, oldest first; None if it looked for none.

    A damaged file holds no runs, and `problem` says what is wrong with it.
    """
    problems: list[str] = []
    document, sha256 = read_json_object(run_root / phase / ACCEPTED_JSON, problems)
    if not sha256:
        return None
    kept = AcceptedRuns()
    if document is not None:
        try:
            kept = AcceptedRuns.model_validate(document)
        except ValidationError as error:
            problems.append(f"{ACCEPTED_JSON} has another shape: {first_problem(error)}")
    found = {"path": f"{phase}/{ACCEPTED_JSON}", "sha256": sha256, "problem": "; ".join(problems)}
    return kept.model_copy(update=found)


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
