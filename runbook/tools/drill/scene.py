"""How a fault is brought about: in a rank of a launch, or to its port, its files or its harness.

`-m runbook.tools.drill.scene FAULT STEP ROOT` is a harness of its own, to be killed.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from nsa.contract import (
    CHECKPOINTS_DIR,
    ENV_JSON,
    INJECTED_JSON,
    RUN_TOKEN_VARIABLE,
    TRAINING_CSV,
    checkpoint_name,
    shard_file,
)
from runbook.folder import LAUNCH_JSON
from runbook.folder.launch.documents import json_object, launch_result
from runbook.launch import run_launch
from runbook.launch.observer import Observer, StopRequest, stop_on_signals
from runbook.launch.supervision import LaunchOptions
from runbook.launch.watch.watchdog import Budgets
from runbook.process import carriers
from runbook.records import Launch, LaunchResult, LaunchStatus
from runbook.records.launch import torchrun
from runbook.tools.drill import BUDGET_S, FAULTS, Fault

_TIMEOUT_S = 240.0
_START_WITHIN_S = 120.0
_END_WITHIN_S = 30.0
_IDLE = "import time; time.sleep(600)"
# Three seconds for what is quick, room for what is slow; a fault may have its own.
_BUDGETS = Budgets(
    init_s=90, first_step_s=60, data_s=BUDGET_S, step_s=BUDGET_S, eval_s=30, checkpoint_s=30,
    exit_s=30, silence_s=90,
)  # fmt: skip
# Small enough that a step takes milliseconds on one core; the parts are all there.
_CONFIG = {"train.seq_len": 64, "model.n_layers": 1, "train.eval_batches": 1}


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What one injection left: the result, the run's folder, when it was injected and when over."""

    root: Path
    launch: Launch
    result: LaunchResult
    injected_at: float | None
    ended_at: float
    remarks: tuple[str, ...] = ()

    @property
    def run_dir(self) -> Path:
        """The launch's own folder."""
        return self.root / self.launch.run_dir


_Play = Callable[[Fault, Path, StopRequest], Scene]


def drill_launch(fault: Fault, *, name: str, extra: tuple[str, ...] = ()) -> Launch:
    """The injected trainer on two gloo ranks."""
    inject = ("-m", "nsa.inject", fault.inject, str(fault.rank), str(fault.step), "--")
    trainer = ("--config", "configs/cpu_smoke.yaml", "--dataset", "synthetic", "--ddp", "1")
    steps = ("--steps", str(fault.steps))
    return Launch(
        name=name,
        phase="drill",
        kind="trainer",
        argv=(*torchrun(2), *inject, *trainer, *steps, *extra),
        env={"NSA_PREFILL_BATCHED": "1"},
        run_dir=name,
        nproc=2,
        steps=fault.steps,
        timeout_s=_TIMEOUT_S,
        config="configs/cpu_smoke.yaml",
        config_overrides={**_CONFIG, **fault.config},
        purpose=fault.title,
        watched=True,
    )


def run_injected(
    fault: Fault,
    root: Path,
    stop: StopRequest,
    *,
    name: str = "run",
    extra: tuple[str, ...] = (),
    retry: bool = False,
) -> Scene:
    """Run one injected launch in `root` to its verdict."""
    launch = drill_launch(fault, name=name, extra=extra)
    result = run_launch(
        launch,
        LaunchOptions(
            run_root=root,
            observer=Observer(),
            stop=stop,
            budgets=replace(_BUDGETS, **fault.budgets),
            retry=retry,
            machine={"OMP_NUM_THREADS": "1", **os.environ, **fault.machine},
        ),
    )
    ended_at = time.monotonic()
    when = injected_at(root / launch.run_dir)
    return Scene(root=root, launch=launch, result=result, injected_at=when, ended_at=ended_at)


def injected_at(run_dir: Path) -> float | None:
    """When the fault happened, on the monotonic clock; None if it never did."""
    when = json_object(run_dir / INJECTED_JSON).get("mono")
    return float(when) if isinstance(when, int | float) else None


def _override(fault: Fault, root: Path, stop: StopRequest) -> Scene:
    """What stands in the machine's environment must not reach the trainer."""
    scene = run_injected(fault, root, stop)
    remarks = []
    env = json_object(scene.run_dir / ENV_JSON)
    effective = env.get("effective", {})
    if effective.get("seq_len") != scene.launch.config_overrides["train.seq_len"]:
        remarks.append(f"seq_len became {effective.get('seq_len')}")
    explicit = [t["name"] for t in env.get("toggles", []) if t.get("source") == "environment"]
    remarks += [f"{name} reached the trainer" for name in explicit if name in fault.machine]
    return replace(scene, remarks=tuple(remarks))


def _port(fault: Fault, root: Path, stop: StopRequest) -> Scene:
    """Take the port between the choice of it and its use; the retry must take another one."""
    taken: list[socket.socket] = []
    ready = threading.Event()

    def take() -> None:
        path = root / "run" / LAUNCH_JSON
        while not ready.wait(0.002):
            port = json_object(path).get("port")
            if port:
                listener = socket.socket()
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(("127.0.0.1", port))
                listener.listen()
                taken.append(listener)
                return

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    scene = run_injected(fault, root, stop, retry=True)
    ready.set()
    thread.join()
    for listener in taken:
        listener.close()
    first, second = (json_object(root / name / LAUNCH_JSON) for name in ("run.attempt1", "run"))
    remarks = []
    if scene.result.attempts != 2:
        remarks.append(f"{scene.result.attempts} attempts instead of 2")
    elif first.get("port") == second.get("port"):
        remarks.append("the second attempt took the same port")
    return replace(scene, remarks=tuple(remarks))


def _leftover(fault: Fault, root: Path, stop: StopRequest) -> Scene:
    """A process of another run must be seen, and must be left alone."""
    token = secrets.token_hex(16)
    other = subprocess.Popen(
        [sys.executable, "-c", _IDLE], env={**os.environ, RUN_TOKEN_VARIABLE: token}
    )
    try:
        time.sleep(0.2)  # until its exec, it shows this process's environment
        seen = other.pid in carriers(token)
        scene = run_injected(fault, root, stop)
        alive = other.poll() is None
    finally:
        other.kill()
        other.wait()
    remarks = [] if seen else ["the leftover was not seen"]
    remarks += [] if alive else ["the leftover of another run was killed"]
    return replace(scene, remarks=tuple(remarks))


def _damaged_checkpoint(
    fault: Fault, root: Path, stop: StopRequest, *, damage: Callable[[Path], None]
) -> Scene:
    """Two checkpoints, the newer one damaged; a resumed run must take the older one."""
    saving = replace(fault, config={"train.save_every": 6}, steps=13)
    before = run_injected(saving, root, stop, name="before")
    if not before.result.ok:
        return before
    damage(before.run_dir / CHECKPOINTS_DIR / checkpoint_name(12) / shard_file(0))
    resumed = ("--resume", str(before.run_dir.resolve()))
    scene = run_injected(fault, root, stop, extra=resumed)
    if stop.requested:
        return scene
    notes = " ".join(json_object(scene.run_dir / ENV_JSON).get("notes", []))
    remarks = []
    if "step_12" not in notes or "refused" not in notes:
        remarks.append("the damaged checkpoint was not named")
    if not (before.run_dir / CHECKPOINTS_DIR / checkpoint_name(6) / shard_file(0)).is_file():
        remarks.append("the checkpoint before it is gone")
    first = (scene.run_dir / TRAINING_CSV).read_text("utf-8").splitlines()[1:2]
    if not first or not first[0].startswith("7,"):
        remarks.append(f"did not resume after step 6: {first}")
    return replace(scene, remarks=tuple(remarks))


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def _flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _to_harness(fault: Fault, root: Path, stop: StopRequest, *, number: int) -> Scene:
    """A harness of its own, which is sent the signal while its launch runs."""
    del stop
    words = ("-m", "runbook.tools.drill.scene", fault.name, str(fault.step), str(root))
    victim = subprocess.Popen([sys.executable, *words], start_new_session=True)
    run_dir = root / "run"
    give_up = time.monotonic() + _START_WITHIN_S
    while injected_at(run_dir) is None and time.monotonic() < give_up:
        if victim.poll() is not None:
            break
        time.sleep(0.02)
    token = str(json_object(run_dir / LAUNCH_JSON).get("run_token", ""))
    sent = time.monotonic()
    victim.send_signal(number)
    try:
        victim.wait(_END_WITHIN_S)
    except subprocess.TimeoutExpired:
        victim.kill()
        victim.wait()
    while token and carriers(token) and time.monotonic() < sent + _END_WITHIN_S:
        time.sleep(0.01)
    ended = time.monotonic()
    # A harness that was killed wrote nothing.
    unknown = LaunchResult(status=LaunchStatus.NOT_RUN, attempts=0, run_token=token)
    return Scene(
        root=root,
        launch=drill_launch(fault, name="run"),
        result=launch_result(run_dir, []) or unknown,
        injected_at=sent if injected_at(run_dir) is not None else None,
        ended_at=ended,
    )


# Each fault has its own way of being brought about.
SCENES: dict[str, _Play] = {
    "launch": run_injected,
    "override": _override,
    "port": _port,
    "leftover": _leftover,
    "checkpoint_truncated": partial(_damaged_checkpoint, damage=_truncate),
    "checkpoint_bit_flip": partial(_damaged_checkpoint, damage=_flip_a_bit),
    "kill_harness": partial(_to_harness, number=signal.SIGKILL),
    "sigint": partial(_to_harness, number=signal.SIGINT),
    "sigterm": partial(_to_harness, number=signal.SIGTERM),
}


def main(argv: list[str]) -> int:
    """Run one injected launch under this program's own signal handlers."""
    with stop_on_signals(StopRequest()) as stop:
        fault = replace(FAULTS[argv[0]], step=int(argv[1]))
        scene = run_injected(fault, Path(argv[2]), stop)
    return 0 if scene.result.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
