"""What the trainer and everything that reads its runs agree on. Torch-free, imports none of ours.

Names of files, columns, events, variables and exit codes are written here once; writers and
readers take them from here. docs/trainer-contract.md says what a run directory holds.
"""

from __future__ import annotations

# Whatever these define is the contract, under one name.
from nsa.contract.digests import *  # noqa: F403
from nsa.contract.tables import *  # noqa: F403
from nsa.contract.words import *  # noqa: F403
