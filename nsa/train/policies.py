"""What torch is allowed to do with numbers in this process: precision, kernels, determinism."""

from __future__ import annotations

from typing import Any

import torch


def allow_tf32() -> None:
    """Let CUDA round float32 products to TF32, in matrix products and in cuDNN (E17)."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True


def policies() -> dict[str, Any]:
    """The switches in force now, for env.json.

    Products of float32 that choose blocks run at "highest" whatever `float32_matmul_precision`
    says (`nsa.attention.compression.full_float32`).
    """
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "tf32_matmul": cuda.matmul.allow_tf32,
        "tf32_cudnn": cudnn.allow_tf32,
        "bf16_reduced_precision_reduction": cuda.matmul.allow_bf16_reduced_precision_reduction,
        "fp16_reduced_precision_reduction": cuda.matmul.allow_fp16_reduced_precision_reduction,
        "fp16_accumulation": cuda.matmul.allow_fp16_accumulation,
        "sdpa_kernels": {
            "flash": cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
            "efficient": cuda.mem_efficient_sdp_enabled(),  # type: ignore[no-untyped-call]
            "cudnn": cuda.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call]
            "math": cuda.math_sdp_enabled(),  # type: ignore[no-untyped-call]
        },
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn_enabled": cudnn.enabled,
        "cudnn_deterministic": cudnn.deterministic,
        "cudnn_benchmark": cudnn.benchmark,
    }
