"""Ways to run the attention's branches: what toggles choose, what is barred, what cannot run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from nsa.attention import PathChoice, choose_selected, choose_window
from nsa.config import ModelConfig, Selected, Way, Window
from nsa.contract import OUT_OF_MEMORY_PREFIX, NSAError
from nsa.launch.arms import triton_asked
from nsa.launch.plan import AUDITED, LaunchPlan
from nsa.step.compiled import Refused
from nsa.toggles import ToggleSet

# What the CPU's allocator says.
_CPU_OOM = ("can't allocate memory", "DefaultCPUAllocator")


class Dispatch:
    """How the two branches run in one launch.

    `barred`: ways that may not be used, and why. A self-test has to show that they compute what
    masks do before anything trains with them; `tested` names what it ran.
    """

    def __init__(
        self, plan: LaunchPlan, cfg: ModelConfig, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """dtype: of attention's inputs."""
        self._config, self._cfg = plan.config, cfg
        self._dtype, self._device = dtype, device
        self.barred = {
            "varlen": "varlen_attn was not tested on this device",
            "triton": "the Triton kernels were not tested on this device",
        }
        self.tested: tuple[str, ...] = ()

    def window(self, toggles: ToggleSet, *, tested: bool = True) -> PathChoice:
        """How the window branch runs under these toggles, and why; `tested`: by what may be used.

        Raises NSAError where a way is asked for by name that cannot run.
        """
        choice = choose_window(
            self._cfg.attention,
            toggles.text("NSA_WINDOW"),
            dtype=self._dtype,
            device=self._device,
            use_flash=self._cfg.way.use_flash and not toggles.flag("NSA_SDPA_NO_FLASH"),
            triton=triton_asked(toggles, self._config.runtime.use_triton_sel),
            seq_len=self._config.train.seq_len,
        )
        return self._allowed(choice, "masked") if tested else choice

    def selected(self, toggles: ToggleSet, *, tested: bool = True) -> PathChoice:
        """How the selected branch runs under these toggles, and why; `tested` as for `window`.

        Raises NSAError where the Triton kernels are asked for by name and cannot run.
        """
        choice = choose_selected(
            self._cfg.attention,
            triton_asked(toggles, self._config.runtime.use_triton_sel),
            seq_len=self._config.train.seq_len,
            dtype=self._dtype,
            device=self._device,
        )
        return self._allowed(choice, "sdpa") if tested else choice

    def _allowed(self, choice: PathChoice, other: str) -> PathChoice:
        why = self.barred.get(choice.value)
        return choice if why is None else PathChoice(value=other, reason=why)

    def way(self, toggles: ToggleSet) -> Way:
        """How attention runs as these toggles choose, by what may be used.

        Raises Refused where the selected branch cannot run as asked, NSAError where the window
        cannot.
        """
        window = self.window(toggles).value
        try:
            selected = self.selected(toggles).value
        except NSAError as error:
            raise Refused(str(error)) from error
        return self.way_of(toggles, window, selected)

    def way_of(self, toggles: ToggleSet, window: str, selected: str) -> Way:
        """The same with these two branches run as named; a CPU's own paths are no ways of SDPA's.

        What restricts SDPA's kernels is about SDPA, on any device.
        """
        return replace(
            self._cfg.way,
            selection_ranges="v2" if toggles.flag("NSA_SEL_RANGES_V2") else "v1",
            force_sdpa=forces_sdpa(toggles) or "triton" in (window, selected),
            window=cast("Window", window),
            selected=cast("Selected", selected),
        )


def allow_kernels(toggles: ToggleSet) -> None:
    """Which kernels SDPA may choose from."""
    others = not toggles.flag("NSA_SDPA_FLASH_ONLY")
    torch.backends.cuda.enable_flash_sdp(not toggles.flag("NSA_SDPA_NO_FLASH"))
    torch.backends.cuda.enable_mem_efficient_sdp(others)
    torch.backends.cuda.enable_cudnn_sdp(others)
    torch.backends.cuda.enable_math_sdp(others)


def forces_sdpa(toggles: ToggleSet) -> bool:
    """Is something about SDPA's kernels restricted?"""
    return toggles.flag("NSA_SDPA_NO_FLASH") or toggles.flag("NSA_SDPA_FLASH_ONLY")


def needs_trial(toggles: ToggleSet) -> bool:
    """May torch find only while it runs that it has no kernel for these toggles?"""
    return any(toggles.flag(n) for n in AUDITED) or toggles.text("NSA_COMPILE") != "off"


def trial_step(model: nn.Module, loss: Callable[[], Tensor]) -> str | None:
    """Forward and backward without communication or update: why they cannot run, or None."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    try:
        torch.autograd.grad(loss(), parameters, allow_unused=True)
    except RuntimeError as error:
        text = " ".join(str(error).split())
        if not is_out_of_memory(error):
            return text
        torch.cuda.empty_cache()  # what was taken in vain is not the next arm's
        return OUT_OF_MEMORY_PREFIX + text
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Did memory run out, on the device or on the host?"""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _CPU_OOM)
