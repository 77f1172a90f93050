"""Runs in each pod of a job: `python -m runbook.launch.kubernetes.agent RUN_DIR`."""

from __future__ import annotations

import os
import sys

from runbook.launch.kubernetes.manifests import ADDRESS_VARIABLE, NODE_VARIABLE
from runbook.launch.nodes.agent import Place, serve
from runbook.launch.nodes.files import Job

# By the Job controller, in the pods of a Job with an index.
_INDEX = "JOB_COMPLETION_INDEX"
# Less than the grace of a pod; an eviction is told by the pod alone, as long as it is there.
_LINGERS_S = 5.0


def _place(job: Job) -> Place:
    """The first pod is reached by its name below that of the job's Service."""
    return Place(
        node=os.environ[NODE_VARIABLE],
        index=int(os.environ.get(_INDEX, "0")),
        address=os.environ[ADDRESS_VARIABLE],
        called=f"{job.name}-0.{job.name}",
        lingers_s=_LINGERS_S,
        own=("KUBERNETES_", _INDEX, NODE_VARIABLE, ADDRESS_VARIABLE),
    )


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], os.environ[NODE_VARIABLE], _place))
