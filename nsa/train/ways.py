"""Ways to run the attention's window and selected branch: what toggles choose, what is barred."""

from __future__ import annotations

import torch

from nsa.attention import PathChoice, choose_selected, choose_window
from nsa.config import ModelConfig, Window
from nsa.contract import NSAError
from nsa.model import NSALanguageModel
from nsa.toggles import ToggleSet
from nsa.train.compiled import Refused
from nsa.train.kernels import triton_asked
from nsa.train.launch import LaunchPlan


class Ways:
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
