"""Which profile fits this machine, from nvidia-smi alone."""

from __future__ import annotations

import shutil
import subprocess

_QUERY = ("--query-gpu=name,pcie.link.gen.max", "--format=csv,noheader")
_TIMEOUT_S = 20.0


def detect_profile() -> tuple[str, str]:
    """Name of the profile that fits this machine, and the reason in words."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "cpu", "nvidia-smi is not installed here: no NVIDIA GPU to use"
    try:
        done = subprocess.run(
            [program, *_QUERY], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "cpu", f"nvidia-smi could not be asked: {error}"
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())
        return "cpu", f"nvidia-smi ended with {done.returncode}: {said}"
    return profile_for(done.stdout)


def profile_for(listing: str) -> tuple[str, str]:
    """Name of the profile for nvidia-smi's lines `name, highest PCIe generation`, and why.

    The cards that no shipped profile knows get `cpu`, which judges function only, and says so.
    """
    cards = [line.rsplit(",", 1) for line in listing.splitlines() if line.strip()]
    names = [card[0].strip() for card in cards]
    if not names:
        return "cpu", "nvidia-smi lists no GPU"
    seen = f"{len(names)} x {names[0]}" if len(set(names)) == 1 else " + ".join(names)
    generations = {card[1].strip() for card in cards if len(card) == 2}
    if len(names) == 2 and all("A100" in name and "PCI" in name for name in names):
        older = generations != {"4"}
        found = "a100x2_pcie3" if older else "a100x2_pcie4"
        return found, f"found {seen}, PCIe generation {'/'.join(sorted(generations))}"
    if len(names) == 1 and "H200" in names[0]:
        return "h200x1", f"found {seen}"
    return "cpu", f"found {seen}: no shipped profile has limits for it, so function only"
