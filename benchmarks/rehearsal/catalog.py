"""Every rehearsed machine, as machines.yaml describes it: a machine that slips through is a defect.

The file says what each field means; cards and drivers are given by their keys.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.rehearsal.hardware import CARDS, DRIVERS, Process
from benchmarks.rehearsal.machine import Ending, Machine
from benchmarks.rehearsal.roofline import Pace

_BASES = {
    "pair": Machine(name="", profile="a100x2_pcie4", story=""),
    "single": Machine(name="", profile="h200x1", story="", card=CARDS["h200"], gpus=1),
}


def _gpu(fields: dict[str, Any]) -> dict[str, Any]:
    """What differs of one GPU."""
    if "processes" in fields:
        fields = {**fields, "processes": tuple(Process(**one) for one in fields["processes"])}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}


_READ = {
    "stopped_by": lambda text: tuple(text.split()),
    "card": CARDS.__getitem__,
    "driver": DRIVERS.__getitem__,
    "paces": lambda paces: tuple(Pace(**one) for one in paces),
    "hot": lambda paces: {rank: Pace(**one) for rank, one in paces.items()},
    "ending": lambda fields: Ending(**fields),
    "gpu": lambda gpus: {index: _gpu(one) for index, one in gpus.items()},
    "failing_tests": tuple,
    "leftovers": tuple,
}


def _machine(item: dict[str, Any]) -> Machine:
    """One machine. Raises TypeError or KeyError where the file says what there is not."""
    base = _BASES[item.pop("of")]
    return replace(base, **{name: _READ.get(name, lambda v: v)(v) for name, v in item.items()})


MACHINES = tuple(
    _machine(item)
    for item in yaml.safe_load(Path(__file__).with_name("machines.yaml").read_text("utf-8"))
)
SICK = tuple(machine for machine in MACHINES if machine.stopped_by)
# Not sick, but the answer of a comparison is another one, and the machine may go.
OTHER_ANSWERS = tuple(one for one in MACHINES if one.name == "fused_slower")
HEALTHY = tuple(one for one in MACHINES if one not in (*SICK, *OTHER_ANSWERS))
