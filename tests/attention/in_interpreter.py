"""Proofs and planted defects of all Triton kernels, in Triton's interpreter.

    TRITON_INTERPRET=1 python -m tests.attention.in_interpreter NAME ...

Prints what is wrong, by name, as JSON: by the name of a kernel a few shapes, by OF/NAME a proof or
a defect of a module that is imported here. A process of its own, because the interpreter is chosen
when triton is imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial

from tests.attention import (
    compressed_in_interpreter,
    core_in_interpreter,
    triton_in_interpreter,
    triton_selected,
    window_in_interpreter,
)

# Odd shapes, forward and backward; the selected branch in both of its forms.
_FEW: dict[str, Callable[[], list[str]]] = {
    "selected": partial(triton_selected.core, cases=triton_selected.CORE[::3]),
    "compressed": partial(
        compressed_in_interpreter.core, cases=compressed_in_interpreter.CORE[::2]
    ),
    "window": partial(window_in_interpreter.core, cases=window_in_interpreter.CORE[1:2]),
    "all": partial(core_in_interpreter.core, cases=core_in_interpreter.CORE[:3]),
    "launches": core_in_interpreter.launches,
    "pool": partial(compressed_in_interpreter.core, cases=compressed_in_interpreter.POOLED),
    "one graph of a layer": triton_in_interpreter.compiled_layer,
}
_ALL = {
    "selected": triton_in_interpreter.PROOFS,
    "compressed": compressed_in_interpreter.PROOFS,
    "window": window_in_interpreter.PROOFS,
    "core": core_in_interpreter.PROOFS,
}
PROOFS = _FEW | {f"{of}/{name}": one for of, proofs in _ALL.items() for name, one in proofs.items()}


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        print(json.dumps({wanted: PROOFS[wanted]()}), flush=True)
