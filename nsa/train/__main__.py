"""Entry point: `python -m nsa.train`, also under torchrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence

from nsa import torch_env
from nsa.contract import ExitCode, NSAError
from nsa.launch.output import shout
from nsa.launch.plan import plan_launch
from nsa.launch.process import Termination, arm_death_signal, dump_stacks_on_usr1
from nsa.torch_env import Passed, for_good


def main(argv: Sequence[str], environ: MutableMapping[str, str]) -> int:
    """Check the launch, then run it. Returns the exit code."""
    arm_death_signal(environ)
    dump_stacks_on_usr1()
    termination = Termination()
    termination.install()
    try:
        plan = plan_launch(argv, environ)
    except NSAError as error:
        # Every rank: torchrun may end rank 0 before it has come to its own refusal.
        rank = _rank(environ)
        shout(str(error) if rank == 0 else f"[rank {rank}] {error}")
        return int(ExitCode.CONFIG)
    translate_environment(plan.passed, environ)
    with for_good():
        import torch._dynamo  # noqa: F401 - the first optimizer would load it

        from nsa.train.session import train

    return train(plan, termination)


def translate_environment(passed: Sequence[Passed], environ: MutableMapping[str, str]) -> None:
    """Give torch the variables under the names it reads; it looks when it is imported."""
    setting, removing = torch_env.changes(list(passed), environ)
    for name in removing:
        del environ[name]
    environ.update(setting)
    # Otherwise torch's profiler writes lines of its own between ours.
    environ.setdefault("KINETO_LOG_LEVEL", "99")


def _rank(environ: Mapping[str, str]) -> int:
    text = environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0


if __name__ == "__main__":
    code = main(sys.argv[1:], os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is written and on the disk; tearing torch down would only take time.
    os._exit(code)
