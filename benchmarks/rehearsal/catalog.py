"""Every rehearsed machine: two that are healthy, and those with one thing wrong."""
from __future__ import annotations
from benchmarks.rehearsal.cards import H200
from benchmarks.rehearsal.machine import Machine
A100 = Machine(name="a100x2_pcie4", profile="a100x2_pcie4", story="two healthy A100 80 GB on PCIe 4")
H200X1 = Machine(name="h200x1", profile="h200x1", story="one healthy H200", card=H200, gpus=1)
MACHINES=(A100,H200X1)
