"""kill -9 at random times: python -m benchmarks.kill_trials [TRIALS] [AT_A_TIME] [VICTIM...]

A plan of three launches in two phases, each with a grandchild in a session of its own, over the
small fake trainer of the tests. Killed are in turn the harness, the launches' parent and a rank.
After each: is anything with one of the run's tokens alive a second later? A killed harness is then
resumed: does the run complete, with the files of finished phases byte for byte as before?
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from runbook.folder.journal import read_events
from runbook.process.reaper import carriers
from runbook.records import RunRecord, Verdict

ROOT = Path(__file__).resolve().parents[1]
VICTIMS = ("harness", "launcher", "rank")


def start(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "tests.engine.toys", *words], cwd=ROOT)


def tokens(out: Path) -> list[str]:
    found = [json.loads(path.read_text())["run_token"] for path in out.rglob("launch.json")]
    return list(dict.fromkeys(found))


def left(out: Path, within_s: float = 1.0) -> int:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and any(carriers(token) for token in tokens(out)):
        time.sleep(0.02)
    return sum(len(carriers(token)) for token in tokens(out))


def digests(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def victim_pid(kind: str, out: Path, chance: random.Random) -> int | None:
    """A live launcher or rank of the run, or None if there is none at this moment."""
    ranks, all_pids = set(), set()
    for token in tokens(out):
        all_pids |= set(carriers(token))
    for path in out.rglob("heartbeat_rank*.jsonl"):
        lines = path.read_text().splitlines()
        ranks |= {json.loads(line)["pid"] for line in lines[:1]}
    if kind == "rank":
        live = sorted(ranks & all_pids)
        return chance.choice(live) if live else None
    for pid in sorted(all_pids - ranks):
        command = (
            Path(f"/proc/{pid}/cmdline").read_bytes() if Path(f"/proc/{pid}").exists() else b""
        )
        if b"fake_trainer" in command:
            return pid
    return None


def trial(kind: str, seed: int) -> dict[str, object]:
    chance = random.Random(f"{kind}{seed}")
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        harness = start("run", name)
        while not list(out.glob("*/baseline/run1/launch.json")):
            time.sleep(0.01)
        folder = next(out.glob("*/baseline/run1/launch.json")).parents[2]
        time.sleep(chance.uniform(0.0, 1.6))
        pid = harness.pid if kind == "harness" else None
        while pid is None and harness.poll() is None:
            pid = victim_pid(kind, out, chance)  # between two launches there is none
        if pid is None or harness.poll() is not None:
            harness.wait()
            return {"kind": kind, "seed": seed, "missed": True, "orphans": left(out)}
        os.kill(pid, signal.SIGKILL)
        harness.wait(120)
        orphans = left(out)
        if kind != "harness":
            record = RunRecord.model_validate_json((folder / "run.json").read_text())
            told = any("SIGKILL" in e.result.cause for p in record.phases for e in p.launches)
            ends = [
                f"{e.result.status}: {e.result.cause}" for p in record.phases for e in p.launches
            ]
            return {"kind": kind, "seed": seed, "orphans": orphans, "told": told, "ends": ends}
        events, _ = read_events(folder / "events.jsonl")
        if any(event["event"] == "run_finished" for event in events):
            return {"kind": kind, "seed": seed, "missed": True, "orphans": orphans}
        finished = [e["record"]["name"] for e in events if e["event"] == "phase_finished"]
        before = digests(folder)
        code = start("resume", str(folder)).wait(120)
        record = RunRecord.model_validate_json((folder / "run.json").read_text())
        after = digests(folder)
        same = all(after.get(f) == d for f, d in before.items() if f.split("/")[0] in finished)
        resumed = code == 0 and record.verdict is Verdict.GO
        return {
            "kind": kind, "seed": seed, "orphans": orphans + left(out), "resumed": resumed,
            "identical": same, "finished_phases": len(finished),
        }  # fmt: skip


def after(kind: str, hit: list[dict[str, object]]) -> str:
    if kind != "harness":
        return f"named as SIGKILL in {sum(bool(result['told']) for result in hit)}"
    phases = sum(int(str(result["finished_phases"])) for result in hit)
    resumed = sum(bool(result["resumed"]) for result in hit)
    same = sum(bool(result["identical"]) for result in hit)
    return f"resumed {resumed}, finished phases ({phases}) byte-identical in {same}"


def main() -> None:
    trials = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    jobs = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    victims = tuple(sys.argv[3:]) or VICTIMS
    plan = [(kind, seed) for kind in victims for seed in range(trials)]
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        results = list(pool.map(lambda item: trial(*item), plan))
    for kind in victims:
        mine = [r for r in results if r["kind"] == kind]
        hit = [r for r in mine if not r.get("missed")]
        orphans = sum(int(str(result["orphans"])) for result in mine)
        print(f"{kind}: {len(hit)} of {len(mine)} hit; orphans {orphans}; {after(kind, hit)}")
        for result in hit:
            if result["orphans"] or not result.get("told", result.get("resumed")):
                print("  ", result)


if __name__ == "__main__":
    main()
