"""Which kernel really ran in each attention branch, read from the profiler's events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nsa.contract import ATTEND_RANGE, CMP_RANGE, WIN_RANGE

BRANCH_RANGES = {"cmp": CMP_RANGE, "sel": ATTEND_RANGE, "win": WIN_RANGE}
# Part of an operator's name, and the kernel that it stands for.
_KERNELS = (
    ("_scaled_dot_product_flash_attention", "flash"),
    ("_scaled_dot_product_efficient_attention", "efficient"),
    ("_scaled_dot_product_cudnn_attention", "cudnn"),
    ("_scaled_dot_product_attention_math", "math"),
    ("nsa::", "triton"),
)
# Softmax by hand is a softmax operator, or the exponentials that make one up.
_SOFTMAX = ("aten::_softmax", "aten::softmax", "aten::exp", "aten::exp_", "aten::exp2_")


class KernelAudit:
    """Profiles the work inside `watch` and sorts its operators by branch."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self.ops: dict[str, Counter[str]] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Profile the enclosed work; afterwards `branches` tells what ran."""
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self._device_type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            yield
        self.ops = operators_by_branch(profiler.events())

    def branches(self) -> dict[str, dict[str, Any]]:
        """For each branch the kernel and the operators with their counts."""
        return {
            branch: {"kernel": kernel_name(ops), "ops": dict(sorted(ops.items()))}
            for branch, ops in self.ops.items()
        }

    def kernels(self) -> dict[str, str]:
        """For each branch the kernel."""
        return {branch: kernel_name(ops) for branch, ops in self.ops.items()}


def operators_by_branch(events: Any) -> dict[str, Counter[str]]:
    """Operators that matter for attention, under the branch range that encloses them."""
    found: dict[str, Counter[str]] = {branch: Counter() for branch in BRANCH_RANGES}
    branch_of = {name: branch for branch, name in BRANCH_RANGES.items()}
    for event in events:
        if event.name not in _SOFTMAX and not any(part in event.name for part, _ in _KERNELS):
            continue
        parent = event.cpu_parent
        while parent is not None and parent.name not in branch_of:
            parent = parent.cpu_parent
        if parent is not None:
            found[branch_of[parent.name]][event.name] += 1
    return found


def kernel_name(ops: Counter[str]) -> str:
    """flash, efficient, cudnn, math, triton, explicit_softmax, several joined by +, or none."""
    names = {kernel for part, kernel in _KERNELS for op in ops if part in op}
    if names:
        return "+".join(sorted(names))
    return "explicit_softmax" if any(op in _SOFTMAX for op in ops) else "none"
