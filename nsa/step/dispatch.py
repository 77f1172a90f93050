"""Ways to run the layers and attention's branches: what toggles choose, what is barred, and why.

Each way that is faster than another is chosen here, held against that one before anything trains
with it, and barred here where it does not agree: the other one runs, and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

import torch
from torch import Tensor, nn

from nsa.attention import PathChoice, choose_selected
from nsa.config import Kernels, ModelConfig, Ranges, Way
from nsa.contract import OUT_OF_MEMORY_PREFIX, NSAError
from nsa.launch.asked import triton_asked, why_not_compiled
from nsa.launch.plan import AUDITED, LaunchPlan
from nsa.step.compiled import Refused
from nsa.toggles import AUTO, NEEDS_CUDA, ToggleSet

# What the CPU's allocator says.
_ABOUT_SDPA = ("NSA_SDPA_NO_FLASH", "NSA_SDPA_FLASH_ONLY")
_CPU_OOM = ("can't allocate memory", "DefaultCPUAllocator")
# Kernels of attention that run only where a test has shown that they compute what masks do.
UNTESTED: dict[Hashable, str] = {
    "triton": "the Triton kernels were not tested on this device",
}
# What of a layer is chosen by itself, and the toggle that chooses it.
LAYERS, REPLAY = "NSA_COMPILE", "NSA_CUDA_GRAPHS"


class Dispatch:
    """How the layers and attention run in one launch.

    `barred`: ways that may not be used, and why; `tested` names what the self-test ran. Compiled
    and replayed layers are held against our own modules when a block asks for them.
    """

    def __init__(
        self, plan: LaunchPlan, cfg: ModelConfig, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """dtype: of attention's inputs."""
        self._config, self._cfg = plan.config, cfg
        self._dtype, self._device = dtype, device
        self.barred = dict(UNTESTED)
        self.tested: tuple[str, ...] = ()

    def selected(self, toggles: ToggleSet, *, tested: bool = True) -> PathChoice:
        """Whether our own kernels run all branches under these toggles, or SDPA, and why.

        `tested`: of what may be used. Raises Refused where they are asked for by name and cannot
        run.
        """
        try:
            choice = choose_selected(
                self._cfg.attention,
                self._triton(toggles),
                seq_len=self._config.train.seq_len,
                dtype=self._dtype,
                device=self._device,
            )
        except NSAError as error:
            raise Refused(str(error)) from error
        why = self.barred.get(choice.value) if tested else None
        return choice if why is None else PathChoice(value="sdpa", reason=why)

    def layers(self, toggles: ToggleSet) -> PathChoice:
        """Whether layers run compiled ("layer") or by our own modules ("off"), and why."""
        asked, device = toggles.text(LAYERS), self._device.type
        if asked != AUTO:
            return PathChoice(value=asked, reason="asked for by name")
        problem: str | None = "a CPU compiles only where that is asked for by name"
        if device != "cpu":
            barred = self.barred.get(self._key(LAYERS, toggles))
            problem = barred or why_not_compiled(toggles, device)
        reason = problem or "agrees with our own modules"
        return PathChoice(value="off" if problem else "layer", reason=reason)

    def replay(self, toggles: ToggleSet) -> PathChoice:
        """Whether layers are replayed ("1") or launched by the host ("0"), and why."""
        asked = toggles.values[REPLAY]
        if asked != AUTO:
            return PathChoice(value="1" if asked else "0", reason="asked for by name")
        if self._device.type == "cpu":
            problem: str | None = NEEDS_CUDA[f"{REPLAY}=1"]
        elif not toggles.flag("NSA_SEL_RANGES_V2"):
            problem = "the plain loops of NSA_SEL_RANGES_V2=0 need the host"
        else:
            problem = self.barred.get(self._key(REPLAY, toggles))
        reason = problem or "agrees with the host"
        return PathChoice(value="0" if problem else "1", reason=reason)

    def bar(self, name: str, toggles: ToggleSet, why: str) -> None:
        """What one of `LAYERS` and `REPLAY` would choose is not to be used with these toggles."""
        self.barred[self._key(name, toggles)] = why

    def state(self, toggles: ToggleSet) -> Hashable:
        """What decides how attention computes: its way and SDPA's kernels.

        Raises what `way` raises.
        """
        return self.way(toggles), *(toggles.flag(name) for name in _ABOUT_SDPA)

    def _key(self, name: str, toggles: ToggleSet) -> Hashable:
        compiled = name == REPLAY and self.layers(toggles).value
        return name, compiled, self.state(toggles)

    def _triton(self, toggles: ToggleSet) -> str:
        """1, 0 or auto: are our own kernels wanted? What is said about SDPA's is about SDPA's."""
        asked = triton_asked(toggles, self._config.runtime.use_triton_sel)
        return "0" if asked == AUTO and forces_sdpa(toggles) else asked

    def way(self, toggles: ToggleSet) -> Way:
        """How attention runs as these toggles choose, by what may be used.

        Raises what `selected` raises.
        """
        return self.way_of(toggles, self.kernels(toggles))

    def kernels(self, toggles: ToggleSet) -> Kernels:
        """The kernels of that way; raises what `selected` raises."""
        return "triton" if self.selected(toggles).value == "triton" else "masked"

    def way_of(self, toggles: ToggleSet, kernels: Kernels) -> Way:
        """The same by the kernels that are named; a CPU's own paths are no ways of SDPA's.

        What restricts SDPA's kernels is about SDPA, on any device, and so are compiled layers:
        what is held against them goes the same way.
        """
        ranges: Ranges = "v2" if toggles.flag("NSA_SEL_RANGES_V2") else "v1"
        compiles = toggles.text(LAYERS) == "layer"
        return replace(
            self._cfg.way,
            selection_ranges=ranges,
            kernels=kernels,
            force_sdpa=forces_sdpa(toggles) or compiles or kernels == "triton",
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
    return any(toggles.flag(name) for name in _ABOUT_SDPA)


def needs_trial(toggles: ToggleSet) -> bool:
    """May torch find only while it runs that it has no kernel for these toggles?"""
    return any(toggles.flag(n) for n in AUDITED) or toggles.text(LAYERS) != "off"


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
