"""Ways to run the attention's branches: what toggles choose, what is barred, what cannot run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from nsa.attention import PathChoice, choose_selected, choose_window
from nsa.config import ModelConfig, Window
from nsa.contract import OUT_OF_MEMORY_PREFIX, NSAError
from nsa.kernels.compiled import Refused
from nsa.launch.kernels import other_kernels, triton_asked
from nsa.launch.plan import AUDITED, LaunchPlan
from nsa.model import NSALanguageModel
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
            use_flash=self._cfg.use_flash and not toggles.flag("NSA_SDPA_NO_FLASH"),
            triton=triton_asked(toggles, self._config.runtime.use_triton_sel),
            seq_len=self._config.train.seq_len,
        )
        if tested and choice.value in self.barred:
            return PathChoice(value="masked", reason=self.barred[choice.value])
        return choice

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
        if tested and choice.value in self.barred:
            return PathChoice(value="sdpa", reason=self.barred[choice.value])
        return choice

    def put_on(self, model: NSALanguageModel, toggles: ToggleSet) -> tuple[str, str]:
        """Let every layer run as these toggles choose; returns the two ways.

        Raises Refused where the selected branch cannot run as asked, NSAError where the window
        cannot.
        """
        allow_kernels(toggles)
        window = self.window(toggles).value
        try:
            selected = self.selected(toggles).value
        except NSAError as error:
            raise Refused(str(error)) from error
        for layer in model.attentions():
            layer.selection_ranges = "v2" if toggles.flag("NSA_SEL_RANGES_V2") else "v1"
            layer.force_sdpa = forces_sdpa(toggles) or "triton" in (window, selected)
            layer.window = named_window(window)
            layer.selected = "triton" if selected == "triton" else "sdpa"
        return window, selected


def allow_kernels(toggles: ToggleSet) -> None:
    """Which kernels SDPA may choose from."""
    others = not toggles.flag("NSA_SDPA_FLASH_ONLY")
    torch.backends.cuda.enable_flash_sdp(not toggles.flag("NSA_SDPA_NO_FLASH"))
    torch.backends.cuda.enable_mem_efficient_sdp(others)
    torch.backends.cuda.enable_cudnn_sdp(others)
    torch.backends.cuda.enable_math_sdp(others)


def named_window(value: str) -> Window:
    """The way that a choice names; whatever runs on a CPU instead is no way of SDPA's."""
    for name in ("varlen", "triton"):
        if value == name:
            return name
    return "masked"


def forces_sdpa(toggles: ToggleSet) -> bool:
    """A restriction of SDPA's kernels is about the SDPA path, on any device."""
    return toggles.flag("NSA_SDPA_NO_FLASH") or toggles.flag("NSA_SDPA_FLASH_ONLY")


def needs_trial(toggles: ToggleSet) -> bool:
    """May torch find only while it runs that it has no kernel for these toggles?"""
    return any(toggles.flag(name) for name in AUDITED) or other_kernels(toggles)


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
