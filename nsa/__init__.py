"""Native Sparse Attention: attention, model, data and trainer.

Importing the package is cheap: names are resolved on first use, so that the torch-free parts
(configuration, FLOP counts, errors) never pay for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsa.config import ModelConfig as ModelConfig
    from nsa.config import NSAConfig as NSAConfig
    from nsa.contract import NSAError as NSAError
    from nsa.layer import NSAAttention as NSAAttention
    from nsa.model import NSALanguageModel as NSALanguageModel

_HOME = {
    "ModelConfig": "nsa.config",
    "NSAConfig": "nsa.config",
    "NSAError": "nsa.contract",
    "NSAAttention": "nsa.layer",
    "NSALanguageModel": "nsa.model",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'nsa' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
