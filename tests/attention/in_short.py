"""Of all kernels a few shapes and planted defects, in Triton's interpreter, in one process.

    TRITON_INTERPRET=1 python -m tests.attention.in_short NAME ...

The grids of shapes and every defect are in the modules that are imported here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial

from tests.attention import (
    between_in_interpreter,
    decode_in_interpreter,
    pooling,
    triton_compressed,
    triton_compressed_in_interpreter,
    triton_in_interpreter,
    triton_kernels,
    window_in_interpreter,
)

# Odd shapes, forward and backward; the selected branch in both of its forms.
_FEW: dict[str, Callable[[], list[str]]] = {
    "selected": partial(triton_kernels.core, cases=triton_kernels.CORE[::3]),
    "compressed": partial(triton_compressed.core, cases=triton_compressed.CORE[::2]),
    "window": partial(window_in_interpreter.core, cases=window_in_interpreter.CORE[1:2]),
    "decode": decode_in_interpreter.core,
    "mix": between_in_interpreter.mix_values,
    "ranges": between_in_interpreter.ranges_values,
    "pool": pooling.pool_values,
}
_ALL = (
    triton_in_interpreter,
    triton_compressed_in_interpreter,
    window_in_interpreter,
    decode_in_interpreter,
    between_in_interpreter,
)
PROOFS = _FEW | {
    f"{module.__name__.rpartition('.')[2]}/{name}": proof
    for module in _ALL
    for name, proof in module.PROOFS.items()
}


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        print(json.dumps({wanted: PROOFS[wanted]()}), flush=True)
