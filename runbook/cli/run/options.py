"""What `runbook run` and its kin ask for, group by group."""

from __future__ import annotations

from runbook import (
    DEFAULT_LAUNCHER,
    DEFAULT_OUT,
    DEFAULT_PROTOCOL,
    DEFAULT_QUEUE_S,
    PROTOCOLS,
)
from runbook.cli._parser import number_type, option_table, whole_type
from runbook.console import OutputFormat
from runbook.errors import ProgramExit

_NOT_NEGATIVE = number_type(at_least=0)
_FORMATS = "|".join(OutputFormat)

# On what, with which settings, and where to.
MACHINE = option_table(
    f"""
    --profile auto|NAME|FILE  the machine and its limits; auto (default) asks nvidia-smi, and takes
        cpu only where no NVIDIA device or driver is seen; see `runbook profiles`
    --set KEY=VALUE  an NSA_* or NCCL_* variable, CONFIG, or a config key such as train.seq_len;
        repeatable; goes over this shell's variables, which go over the preset's and the profile's
        (default: none)
    --preset NAME  variables that belong together, over the profile's and under those of this shell:
        `runbook toggles --preset NAME` shows them, and the commands that take it (default: none)
    --out DIR  each run gets a new folder here (default: {DEFAULT_OUT})
    """,
    profile="auto",
    preset="",
)

# Where the launches run.
PLACE = option_table(
    f"""
    --launcher NAME   where launches run: local, this machine (default), or slurm, each as a job of
        Slurm, on nodes that share this folder and this Python; a package may add others
    --nodes N         with slurm: the nodes over which the profile's ranks are spread (default: 1)
    --partition NAME  with slurm: the partition of the jobs (default: the cluster's)
    --account NAME    with slurm: the account that pays for the jobs (default: the cluster's)
    --queue-s S       with slurm: end a job that has waited S seconds for its nodes
        (default: {DEFAULT_QUEUE_S:g})
    """,
    launcher=DEFAULT_LAUNCHER,
    nodes=1,
    partition="",
    account="",
    queue_s=DEFAULT_QUEUE_S,
)

# How much of it.
PART = option_table(
    """
    --until-s S  end this part of the run within S seconds and exit with 3; --resume goes on with
        the next part. A launch that would be cut off is left to it (default: no limit)
    --dry-run  print the commands with time estimates; start and judge nothing
    """
)

# How the run and its end are told.
TELLING = option_table(
    f"""
    --output-format {_FORMATS}  text (default) for people; json: every event as one JSON line, the
        same as --json; github: annotations, step summary and outputs of GitHub Actions
    --partial-exit 0|4  exit code of PARTIAL PASS: 4 (default), or 0 for a step of a job that runs a
        part on purpose
    """,
    output_format={"choices": [one.value for one in OutputFormat]},
    partial_exit={"type": whole_type(at_least=0), "default": int(ProgramExit.PARTIAL)},
)

# How long, and at which price.
SCALE = option_table(
    """
    --steps-scale F  factor on every step count; less than 1 is only for trying things out
        (default: 1)
    --gpu-hour-price F  price of one GPU for one hour, in any currency, to show what a run costs
        (default: costs are not shown)
    """,
    steps_scale={"type": number_type(above=0), "default": 1.0},
    gpu_hour_price=_NOT_NEGATIVE,
)

# How arms are compared.
MEASURED = option_table(
    f"""
    --protocol {"|".join(PROTOCOLS)}  how arms are compared: in turns inside one launch (blocks), in
        one launch for each arm and round (launches), or one launch of each arm, as the documents
        wrote it (single) (default: blocks)
    --aa  compare an arm with itself; the decision must be TIE
    --seed N  random seed for the order of arms (default: 0)
    --reference COMMIT  what phase regression compares with (no default); a clean checkout of it is
        made for the run
    --head COMMIT  what phase regression holds against it (default: the commit of this checkout)
    """,
    protocol=DEFAULT_PROTOCOL,
    seed={"type": whole_type(at_least=0), "default": 0},
    reference="",
    head="",
)
