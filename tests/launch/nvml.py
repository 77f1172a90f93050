"""A machine with GPUs that are not there: an NVML to load and an nvidia-smi to run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from runbook.machine.gpu import devices as counters
from tests.factory.programs import first_on_path, program

SOURCE = Path(__file__).with_name("nvml_stand_in.c")


class Machine:
    """Loads the stand-in wherever the real library would be; `say` changes what it answers."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler: the stand-in for NVML cannot be built")
        library = folder / "lib" / "libnvidia-ml.so.1"
        library.parent.mkdir(parents=True)
        command = [compiler, "-shared", "-fPIC", "-Wall", "-o", str(library), str(SOURCE)]
        subprocess.run(command, check=True, capture_output=True)
        self._file = folder / "stand_in.txt"
        self._said: dict[str, int] = {}
        self.say()
        monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
        monkeypatch.setenv("NVIDIA_STAND_IN", str(self._file))
        monkeypatch.setattr(counters, "LIBRARY", str(library))

    def say(self, **values: int) -> None:
        """Answer so from now on."""
        self._said |= values
        self._file.write_text("".join(f"{k} {v}\n" for k, v in self._said.items()))


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, xml: Path | None) -> None:
    """A program of that name that prints this XML, or fails as one without a driver does."""
    told = f"cat {xml}" if xml else "echo 'NVIDIA-SMI has failed' >&2; exit 9"
    program(folder / "nvidia-smi", f"case $1 in -q) {told};; *) exit 1;; esac")
    first_on_path(monkeypatch, folder)
