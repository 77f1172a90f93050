"""Runs on each node of a job: `python -m runbook.launch.slurm.agent RUN_DIR`, started by srun."""

from __future__ import annotations

import os
import sys

from runbook.launch.nodes.agent import Place, address_of, serve
from runbook.launch.nodes.files import Job
from runbook.launch.slurm.commands import node_words

# Of the job, not of the launch: with them in its environment a program would think it is a task.
_FROM_SLURM = ("SLURM", "SBATCH", "PMI_", "PMIX_")


def _place(_job: Job) -> Place:
    node, index = os.environ["SLURMD_NODENAME"], int(os.environ["SLURM_NODEID"])
    address = address_of(node_words(node).get("NodeAddr") or node)
    return Place(node=node, index=index, address=address, called=address, own=_FROM_SLURM)


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], os.environ["SLURMD_NODENAME"], _place))
