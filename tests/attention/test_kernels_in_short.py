"""What the fast tier asks of each Triton kernel; test_triton*.py ask for everything."""

from __future__ import annotations

import pytest

from tests.attention.defects import defects
from tests.attention.triton_process import found, needs_triton
from tests.shared import once
from tests.tiers import is_sampled

FEW = ("selected", "compressed", "window", "decode", "mix", "ranges", "pool")
PLANTED = {
    "triton_in_interpreter": defects("selected", "selected_by_block", "selected_lists"),
    "triton_compressed_in_interpreter": defects("compressed"),
    "window_in_interpreter": defects("window"),
    "decode_in_interpreter": defects("decode"),
    "between_in_interpreter": defects("mix", "ranges", "pool"),
}
# A change of nothing has to live, or a defect that is seen says nothing.
CONTROL = "triton_in_interpreter/control"
SAMPLED = [
    f"{module}/{name}"
    for module, mutants in PLANTED.items()
    for name, (path, _, _) in mutants.items()
    if is_sampled(name, path) and not name.endswith("control")
]


@pytest.fixture(scope="session")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What is wrong, by kernel and by planted defect."""
    names = (*FEW, CONTROL, *SAMPLED)
    return once(tmp_path_factory, "kernels", lambda _: found(*names, of="in_short"))


@needs_triton
@pytest.mark.parametrize("kernel", FEW)
def test_each_kernel_computes_the_equations(kernel: str, told: dict[str, list[str]]) -> None:
    assert told[kernel] == []


@needs_triton
@pytest.mark.parametrize("name", SAMPLED)
def test_a_planted_defect_is_seen(name: str, told: dict[str, list[str]]) -> None:
    assert told[name] and told[CONTROL] == []
