"""Entry point: `python -m nsa.train`, also under torchrun."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping, Sequence

from nsa import torch_env
from nsa.contract import NSAError
from nsa.launch.plan import LaunchPlan, plan_launch
from nsa.launch.process import leave, refuse, take_signals
from nsa.torch_env import for_good


def main(argv: Sequence[str], environ: MutableMapping[str, str]) -> int:
    """Check the launch, then run it. Returns the exit code."""
    termination = take_signals(environ)
    try:
        plan = plan_launch(argv, environ)
    except NSAError as error:
        return refuse(error, environ)
    torch_env.translate(plan.passed, environ)
    with for_good():
        _load(plan)
        from nsa.train.session import train

    return train(plan, termination)


def _load(plan: LaunchPlan) -> None:
    """Load what is slow to load and would be loaded later on, of what this launch needs."""
    import torch._dynamo  # the first optimizer would

    if plan.saves or plan.flags.resume:
        import torch.distributed.checkpoint  # noqa: F401


if __name__ == "__main__":
    leave(main(sys.argv[1:], os.environ))
