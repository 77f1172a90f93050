"""Which implementation serves a call, and why."""

from __future__ import annotations

from dataclasses import dataclass

from nsa.config import NSAConfig, Path


@dataclass(frozen=True, kw_only=True)
class PathChoice:
    """The implementation chosen (`value`) and the reason, for people and for env.json."""

    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.value} ({self.reason})"


def choose_path(
    cfg: NSAConfig, seq_len: int, *, path: Path = "batched", device: str = "cpu"
) -> PathChoice:
    """Say how `nsa_attention` will run for this config, length, path and device type."""
    if path != "batched":
        return PathChoice(value=path, reason="asked for by name")
    if device != "cpu":
        return PathChoice(value="sdpa", reason=f"device {device}: masked SDPA by chunks of queries")
    full = cfg.n_sel * cfg.l_sel
    if seq_len <= full:
        reason = f"S={seq_len} <= n_sel*l_sel={full}: every query selects all it sees"
        return PathChoice(value="cpu_dense", reason=reason)
    reason = f"S={seq_len} > n_sel*l_sel={full}: later queries attend block by block"
    return PathChoice(value="cpu_block", reason=reason)
