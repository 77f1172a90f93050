"""The run directory: made for one launch, refused when anything of an earlier one is in it."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

from nsa import contract, torch_env
from nsa.launch.output import Heartbeat
from nsa.launch.plan import Place
from nsa.launch.process import open_stackdump
from nsa.settings import ConfigError

_LEFTOVERS = (
    contract.TRAINING_CSV,
    contract.VAL_CSV,
    contract.GATES_CSV,
    contract.ENV_JSON,
    contract.HALT_FILE,
    contract.ENOUGH_FILE,
    contract.HEARTBEATS.glob(),
    contract.SDPA_AUDIT_JSON,
    contract.CEILINGS_JSON,
    contract.CHECKPOINTS_DIR,
)


def new_token() -> str:
    """A token for a launch started by hand."""
    return secrets.token_hex(8)


def by_hand(out_dir: str, token: str) -> Path:
    """`out_dir/<UTC>-<token>` for a launch without a harness."""
    utc = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return Path(out_dir).resolve() / f"{utc}-{token}"


def leftovers(run_dir: Path, world_size: int) -> list[str]:
    """Names in the directory that belong to an earlier launch.

    Heartbeats of this launch's other ranks may be there already: each rank refuses its own.
    """
    found: list[str] = []
    for pattern in _LEFTOVERS:
        found += sorted(path.name for path in run_dir.glob(pattern))
    ours = {contract.HEARTBEATS.name(rank) for rank in range(1, world_size)}
    return [name for name in found if name not in ours]


def claim(run_dir: Path, world_size: int) -> None:
    """Make the directory, private to its owner. Raises ConfigError for one that was used."""
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run directory {run_dir}: {error.strerror or error}") from error
    found = leftovers(run_dir, world_size)
    if found:
        stale = " (a stale .HALT is refused, not obeyed)" if contract.HALT_FILE in found else ""
        raise ConfigError(
            f"run directory {run_dir} belongs to an earlier launch: it holds "
            f"{', '.join(found)}{stale}; give every launch a directory of its own"
        )


def open_run_dir(run_dir: Path, place: Place, beat: Heartbeat, *, grouped: bool) -> None:
    """Claim the directory and start this rank's own files in it.

    Raises ConfigError where the directory belongs to an earlier launch.
    """
    if place.rank == 0:
        claim(run_dir, place.world_size)
    else:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        beat.open(run_dir)
    except FileExistsError as error:
        raise ConfigError(
            f"run directory {run_dir} belongs to an earlier launch: it holds "
            f"{Path(error.filename).name}; give every launch a directory of its own"
        ) from error
    if grouped:
        # torch looks when it makes the process group, or when it dumps.
        prefix = str(run_dir / contract.NCCL_FLIGHTS.stem)
        os.environ.update(torch_env.flight_dumps(prefix))
    open_stackdump(run_dir, place.rank)


def link_latest(run_dir: Path, out_dir: str) -> None:
    """Point `latest` at a directory of `by_hand`, beside it and in the folder of all runs.

    That is what a relative `out_dir` begins with, `artifacts`, whose link the harness moves too.
    """
    contract.link_latest(run_dir.parent, run_dir)
    top = Path(Path(out_dir).parts[0]).resolve()
    if not Path(out_dir).is_absolute() and run_dir.parent.is_relative_to(top):
        with suppress(OSError):  # whatever has that name there is not the trainer's affair
            contract.link_latest(top, run_dir)
