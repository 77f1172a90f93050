"""Native Sparse Attention: attention, model, data and trainer.

Importing the package is cheap: names are resolved on first use, so that the torch-free parts
(configuration, FLOP counts, errors) never pay for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsa.config import ModelConfig, NSAConfig
    from nsa.contract import NSAError
    from nsa.model import NSALanguageModel
    from nsa.module import NSAAttention

__version__ = "0.1.0"

_HOME = {
    "ModelConfig": "nsa.config",
    "NSAConfig": "nsa.config",
    "NSAError": "nsa.contract",
    "NSAAttention": "nsa.module",
    "NSALanguageModel": "nsa.model",
}

__all__ = [
    "ModelConfig",
    "NSAAttention",
    "NSAConfig",
    "NSAError",
    "NSALanguageModel",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'nsa' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
