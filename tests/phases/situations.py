"""Two situations that remedies have to fit."""

from __future__ import annotations

from dataclasses import replace

from phases.kit.playbook import Situation

ON_TWO_A100 = Situation(
    device="cuda", ranks=2, dtype="bf16", seq_len=2048, pcie=True, folder="baseline/run1"
)
ON_A_CPU = replace(ON_TWO_A100, device="cpu", dtype="fp32", seq_len=128, pcie=False)
