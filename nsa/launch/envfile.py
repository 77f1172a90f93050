"""env.json: everything a reader needs to know what this launch really was."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

import nsa
from nsa.attention import choose_path
from nsa.config import model_flops_per_token
from nsa.contract import ENV_JSON, GIT_PLACES, SECRET_SHAPES, URL_LOGIN, is_secret_name
from nsa.contract.digests import installed_digest, package_digest
from nsa.launch.output import say, write_json
from nsa.launch.plan import LaunchPlan

_REDACTED = "[redacted]"
_ASSIGNED = re.compile(r"(?P<name>[\w.-]+)=(?P<value>[^\s&;]+)")


_NOT_COMPARED = ("steps", "schedule_steps", "per_rank_batch")
_COMPARED_TOGGLES = ("NSA_HEARTBEAT_EVERY", "NSA_MEM_DUMP_EVERY", "NSA_NVTX")


def redact(text: str) -> str:
    """The text with everything that looks like a secret replaced."""
    text = URL_LOGIN.sub(rf"\g<scheme>{_REDACTED}@", text)
    return SECRET_SHAPES.sub(_REDACTED, _ASSIGNED.sub(_assigned, text))


def _assigned(match: re.Match[str]) -> str:
    name = match["name"]
    return f"{name}={_REDACTED}" if is_secret_name(name.strip("-.")) else match[0]


def git_state() -> dict[str, Any]:
    """Branch, commit and differences of the checkout the package runs from; nulls without one."""
    empty: dict[str, Any] = dict.fromkeys(("branch", "sha", "dirty", "diff_sha256"))
    folder = Path(nsa.__file__).resolve().parent.parent
    sha = _git(folder, "rev-parse", "HEAD")
    if sha is None:
        return empty
    status = _git(folder, "status", "--porcelain") or b""
    diff = (_git(folder, "diff", "HEAD") or b"") if status.strip() else b""
    branch = _git(folder, "rev-parse", "--abbrev-ref", "HEAD") or b""
    return {
        "branch": branch.decode().strip(),
        "sha": sha.decode().strip(),
        "dirty": bool(status.strip()),
        "diff_sha256": hashlib.sha256(diff + status).hexdigest() if status.strip() else None,
    }


def _git(folder: Path, *words: str) -> bytes | None:
    git = shutil.which("git")
    if git is None:
        return None
    environment = {name: text for name, text in os.environ.items() if name not in GIT_PLACES}
    try:
        done = subprocess.run(
            [git, "-C", str(folder), *words],
            capture_output=True,
            check=False,
            timeout=20,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def package() -> dict[str, str]:
    """Where the package lies that runs here, and the digest of its files."""
    folder = Path(nsa.__file__).resolve().parent
    return {"path": str(folder), "sha256": package_digest(folder)}


def versions() -> dict[str, str | None]:
    """Versions of what decides numbers and speed; null for what is not there.

    `packages` is a digest over the versions of everything that training computes with.
    """
    nccl: Any = torch.cuda.nccl.version
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl())) if torch.cuda.is_available() else None,
        "driver": _found_in("/proc/driver/nvidia/version", r"\b(\d+\.\d+(?:\.\d+)?)\b"),
        "triton": next((found.version for found in distributions(name="triton")), None),
        "packages": _packages(),
    }


# The tests that are shipped make a dozen launches in one process.
_packages = cache(installed_digest)


def _found_in(path: str, pattern: str) -> str | None:
    """What a file of the kernel's says where the pattern has its group; None without that."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(pattern, text, re.MULTILINE)
    return found[1] if found else None


def device_facts(device: torch.device, *, ranks: int) -> dict[str, Any]:
    """Type, name and count of the devices; of GPUs the UUIDs of those that ranks train on."""
    if device.type == "cuda":
        count = torch.cuda.device_count()
        used = [torch.cuda.get_device_properties(index) for index in range(min(ranks, count))]
        return {
            "type": "cuda",
            "name": torch.cuda.get_device_name(device),
            "count": count,
            "uuids": [str(gpu.uuid) for gpu in used],
        }
    name = _found_in("/proc/cpuinfo", r"^model name\s*:\s*(.*\S)") or platform.machine()
    return {"type": "cpu", "name": name, "count": torch.get_num_threads()}


def effective(
    plan: LaunchPlan, *, device: torch.device, n_params: int, floor: float | None, floor_source: str
) -> dict[str, Any]:
    """What the launch really trains, after every override."""
    train, model = plan.config.train, plan.model_config()
    path, reason = plan.attention_path
    if path == "batched":
        reason = f"{reason}; {choose_path(model.attention, train.seq_len, device=device.type)}"
    checkpointing, checkpointing_reason = plan.checkpointing
    return {
        "seq_len": train.seq_len,
        "global_batch": train.batch_size,
        "per_rank_batch": plan.per_rank_batch,
        "accumulation": train.accumulate_grad_batches,
        "tokens_per_step": plan.tokens_per_step,
        "steps": plan.total_steps,
        "schedule_steps": plan.schedule_steps,
        "n_layers": model.n_layers,
        "n_params": n_params,
        "vocab_size": model.vocab_size,
        "dtype": plan.config.runtime.precision,
        "master_dtype": "fp32",
        "device": device.type,
        "attention_path": path,
        "attention_path_reason": reason,
        "gradient_checkpointing": checkpointing,
        "gradient_checkpointing_reason": checkpointing_reason,
        "model_flops_per_token": model_flops_per_token(model, train.seq_len),
        "loss_floor": floor,
        "loss_floor_source": floor_source,
    }


def comparable_digest(plan: LaunchPlan, facts: Mapping[str, Any]) -> str:
    """SHA-256 over what must be equal for two launches to be compared.

    Left out: the output folder, the step counts, what an arm may change, and how many ranks
    share the global batch (a comparison of one GPU with two has the same digest). Gradient
    checkpointing counts as it really ran, not as the file asked for it.
    """
    config = plan.config.model_dump()
    for key in ("out_dir", "steps"):
        config["train"].pop(key)
    config["runtime"].pop("gradient_checkpointing")
    kept = {k: v for k, v in facts.items() if k not in _NOT_COMPARED and "reason" not in k}
    toggles = {name: plan.toggles.values[name] for name in _COMPARED_TOGGLES}
    text = json.dumps([config, kept, toggles], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def write_env(
    run_dir: Path, plan: LaunchPlan, device: torch.device, told: Mapping[str, Any]
) -> None:
    """Write env.json atomically.

    told: by their names there, what is no part of the plan: `run_token`, `started_at`, `effective`,
    `attention` (how its window and selected branches run, and the self-test), `notes`, and
    `resumed` (path, step and digest of the checkpoint that the launch went on from).
    """
    content = {
        "schema_version": 1,
        **told,
        "argv": [redact(word) for word in plan.argv],
        "git": git_state(),
        "package": package(),
        "versions": versions(),
        "world_size": plan.place.world_size,
        "nodes": plan.place.nodes,
        "device": device_facts(device, ranks=plan.place.world_size),
        "config": plan.config.model_dump(),
        "config_file": plan.loaded.path,
        "config_sources": dict(plan.loaded.sources),
        "config_sha256": comparable_digest(plan, told["effective"]),
        "policies": policies(),
        "toggles": plan.toggles.describe(),
        "passthrough": [
            {k: redact(v) if v else v for k, v in row.describe().items()} for row in plan.passed
        ],
        "arms": plan.schedule.model_dump() if plan.schedule else None,
    }
    write_json(run_dir / ENV_JSON, content)


def announce(plan: LaunchPlan, facts: Mapping[str, Any], attention: Mapping[str, Any]) -> None:
    """Say in the log what the launch is."""
    say(
        f"[config] {facts['n_params']:,} parameters, S={facts['seq_len']}, global batch "
        f"{facts['global_batch']} x {facts['accumulation']}, {facts['dtype']}, "
        f"{plan.place.world_size} rank(s) on {facts['device']}, {facts['steps']} steps, "
        f"dataset {facts['dataset']}"
    )
    say(f"[attention] {facts['attention_path']} ({facts['attention_path_reason']})")
    selected, tested = attention["selected"], attention["self_test"]
    say(f"[selected] {selected['value']} ({selected['reason']})")
    if not tested["ran"]:
        say(f"[self-test] none ({tested['reason']})")
    say(
        f"[checkpointing] gradient checkpointing {facts['gradient_checkpointing']} "
        f"({facts['gradient_checkpointing_reason']})"
    )
    for row in plan.passed:
        if row.note:
            say(f"[env] {row.name}={row.value}: {row.note}")


def sdpa_kernels() -> dict[str, bool]:
    """By name, which kernels SDPA may choose from."""
    cuda: Any = torch.backends.cuda
    return {
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }


def policies() -> dict[str, Any]:
    """The switches in force now, for env.json.

    Products of float32 that choose blocks run at "highest" whatever `float32_matmul_precision`
    says (`nsa.attention.selection.full_float32`).
    """
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "tf32_matmul": cuda.matmul.allow_tf32,
        "tf32_cudnn": cudnn.allow_tf32,
        "bf16_reduced_precision_reduction": cuda.matmul.allow_bf16_reduced_precision_reduction,
        "fp16_reduced_precision_reduction": cuda.matmul.allow_fp16_reduced_precision_reduction,
        "fp16_accumulation": cuda.matmul.allow_fp16_accumulation,
        "sdpa_kernels": sdpa_kernels(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn_enabled": cudnn.enabled,
        "cudnn_deterministic": cudnn.deterministic,
        "cudnn_benchmark": cudnn.benchmark,
    }
