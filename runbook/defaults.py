"""What a run does where nobody says otherwise. Imports nothing: the command line reads it first."""

from __future__ import annotations

DEFAULT_OUT = "artifacts"
DEFAULT_PLAN = "production"
# How arms are compared; the first is the default.
PROTOCOLS = ("blocks", "launches", "single")
DEFAULT_PROTOCOL = PROTOCOLS[0]
# Where launches run: on this machine.
DEFAULT_LAUNCHER = "local"
# How long a job may wait for its nodes.
DEFAULT_QUEUE_S = 3600.0
