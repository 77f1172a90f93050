"""Programs that stand on PATH in a rehearsal (bin), and a torch that only answers.

The real collectors start them as they would start the real ones. Each prints what was written for
the machine, from files in one folder, which change as the machine does.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rehearsal.hardware import Gpu, query_xml, topology
from benchmarks.rehearsal.machine import Machine
from benchmarks.rehearsal.trainer.rundir import NCCL, SHA, TORCH

_TORCH = '''"""What torch would answer on the rehearsed machine; it can do nothing else."""
__version__ = {version!r}
class version:
    cuda = {cuda!r}
class cuda:
    class nccl:
        @staticmethod
        def version(): return {nccl!r}
    @staticmethod
    def is_available(): return {count} > 0
    @staticmethod
    def device_count(): return {count}
'''
_COLLECT_ENV = """def get_pretty_env_info():
    return "A rehearsal: no GPU is here.\\nPyTorch version: {version}\\nNvidia driver: {driver}"
"""


class Bench:
    """The folder with the programs and their state, of one machine."""

    def __init__(self, folder: Path, machine: Machine) -> None:
        self.machine = machine
        self.programs, self.packages = folder / "bin", folder / "packages"
        self.state = folder / "state"
        for path in (self.packages / "torch" / "utils", self.state):
            path.mkdir(parents=True)
        shutil.copytree(Path(__file__).with_name("bin"), self.programs)
        (self.state / "sha.txt").write_text(f"{SHA}\n", encoding="utf-8")
        self._log: list[str] = []
        self.log(["Linux version 6.8.0-rehearsal", "nvidia: module loaded"])
        self._torch()
        self.show([machine.at_rest(index) for index in range(machine.gpus)])

    def _torch(self) -> None:
        machine = self.machine
        version = TORCH[machine.torch_cuda]
        text = _TORCH.format(
            version=version,
            cuda=machine.torch_cuda,
            count=machine.devices,
            nccl=tuple(map(int, NCCL.split("."))),
        )
        (self.packages / "torch" / "__init__.py").write_text(text, encoding="utf-8")
        (self.packages / "torch" / "utils" / "__init__.py").touch()
        told = _COLLECT_ENV.format(version=version, driver=machine.driver.version)
        (self.packages / "torch" / "utils" / "collect_env.py").write_text(told, encoding="utf-8")

    def log(self, lines: Sequence[str]) -> None:
        """What the kernel writes now."""
        self._log += lines
        text = [f"<6>[{900 + n:5d}.{n:06d}] {line}" for n, line in enumerate(self._log)]
        (self.state / "kernel.txt").write_text("\n".join(text) + "\n", encoding="utf-8")

    def show(self, gpus: Sequence[Gpu], *, lost: str = "") -> None:
        """What nvidia-smi tells from now on; `lost` is what it says of a GPU that is gone."""
        text = query_xml(self.machine.driver, gpus)
        files = {
            "query.xml": f"{lost}\n" if lost else text,
            "code.txt": "15" if lost else "0",
            "topology.txt": topology(gpus, self.machine.link),
            "list.txt": "".join(f"GPU {g.index}: {g.card.name} (UUID: {g.uuid})\n" for g in gpus),
        }
        for name, content in files.items():
            (self.state / name).write_text(content, encoding="utf-8")
