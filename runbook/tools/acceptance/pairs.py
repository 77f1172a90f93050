"""Stage `step`: which choices make a step faster, and its rate with a batch that fills memory.

    python -m runbook.tools.acceptance.pairs --out DIR --profile NAME [--left-s S] [--stand-in]

The pairs are data (`configs/acceptance/pairs.yaml`). Every launch keeps its folder; one that ended
well is not repeated in the next part.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field

from nsa.contract import ENV_JSON, TRAINING_CSV, NSAError
from nsa.toggles import ARM_TOGGLES, TOGGLES
from runbook.config import Profile, load_profile
from runbook.files import data_path
from runbook.folder.heartbeats import heartbeat_files
from runbook.folder.launch import read_training_csv
from runbook.folder.names import RESULT_JSON
from runbook.folder.rank_log import read_heartbeats
from runbook.launch import StopRequest, run_launch, set_aside, stop_on_signals
from runbook.launch.observer import Observer
from runbook.records import ArmSchedule, Launch, LaunchResult, LaunchStatus
from runbook.records.evidence import TrainingLog
from runbook.records.measurement import Record
from runbook.stats import block_throughputs, complete_rounds, effective, faster
from runbook.tools.acceptance.program import Program, markdown_table
from runbook.tools.acceptance.stages import TO_BE_CONTINUED

PAIRS_FILE = "acceptance/pairs.yaml"
_TIMEOUT_S = 150.0
_BASE = "base"
_TOO_LITTLE_S = 5.0


class Amount(Record):
    """How often and how long arms take turns."""

    rounds: int = Field(ge=3)
    steps: int = Field(ge=1)
    warmup: int = Field(ge=0)
    launch_rounds: int = Field(ge=1)
    launch_steps: int = Field(ge=2)


class Variant(Record):
    """A choice: the variables `set` beside those of `against`, and the package it takes."""

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    set: dict[str, str] = Field(min_length=1)
    against: dict[str, str] = Field(min_length=1)
    package: str = ""

    @property
    def unknown(self) -> list[str]:
        """What this build or machine lacks for it."""
        found = []
        if self.package and importlib.util.find_spec(self.package) is None:
            found.append(f"no package {self.package} here")
        for name, value in {**self.against, **self.set}.items():
            if name not in TOGGLES:
                found.append(f"no toggle {name} in this build")
                continue
            try:
                TOGGLES[name].parse(value)
            except NSAError as error:
                found.append(str(error))
        return found

    @property
    def in_launch(self) -> bool:
        """May it change between the blocks of one launch?"""
        return all(name in ARM_TOGGLES for name in (*self.set, *self.against))


class Batch(Record):
    """How the batch grows."""

    memory_share: float = Field(gt=0, lt=1)
    grow: int = Field(ge=2)
    steps: int = Field(ge=2)
    largest: int = Field(ge=1)


class PairsFile(Record):
    """The whole file."""

    schema_version: Literal[1]
    device: Amount
    stand_in: Amount
    variants: tuple[Variant, ...]
    stand_in_variants: tuple[str, ...]
    batch: Batch
    stand_in_batch: Batch


def load_pairs() -> PairsFile:
    """The shipped pairs. Raises pydantic's error for a wrong file, which a test would see first."""
    path = data_path("configs") / PAIRS_FILE
    return PairsFile.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))


class OutOfTime(Exception):
    """The next launch would not fit; the next part begins with it."""


@dataclass(kw_only=True)
class Bench:
    """Launches of one stage: started where they have no result yet, each in a folder of its own."""

    program: Program
    profile: Profile
    stop: StopRequest
    longest_s: float = 0.0

    @property
    def root(self) -> Path:
        """The stage's folder."""
        return Path(self.program.args.out)

    def run(self, launch: Launch) -> LaunchResult:
        """The launch's result, of now or of an earlier part.

        Raises OutOfTime where it would not end in time.
        """
        run_dir = self.root / launch.run_dir
        kept = run_dir / RESULT_JSON
        if kept.is_file():
            result = LaunchResult.model_validate_json(kept.read_bytes())
            if result.status is not LaunchStatus.INTERRUPTED:
                return result
        if self.stop.requested or self.program.left_s < max(_TOO_LITTLE_S, 1.2 * self.longest_s):
            raise OutOfTime
        if run_dir.exists():
            set_aside(run_dir, "unfinished")
        self.program.say(f"{launch.name}: {launch.steps} steps")
        limit_s = min(_TIMEOUT_S, max(_TOO_LITTLE_S, self.program.left_s))
        limited = launch.model_copy(update={"timeout_s": limit_s})
        result = run_launch(limited, self.root, observer=Observer(), stop=self.stop, retry=False)
        self.longest_s = max(self.longest_s, result.duration_s)
        if result.status is LaunchStatus.INTERRUPTED or (
            result.status is LaunchStatus.TIMED_OUT and limit_s < _TIMEOUT_S
        ):
            set_aside(run_dir, "unfinished")
            raise OutOfTime
        return result

    def log(self, launch: Launch) -> TrainingLog:
        """What it wrote."""
        return read_training_csv(self.root / launch.run_dir / TRAINING_CSV, relative_to=self.root)

    def refused(self, launch: Launch) -> dict[str, str]:
        """The arms that could not run, each with the reason of its first rank."""
        found: dict[str, str] = {}
        for rank, path in heartbeat_files(self.root / launch.run_dir).items():
            log = read_heartbeats(path, rank=rank, relative_to=self.root)
            for failure in log.arm_failures:
                found.setdefault(str(failure.get("arm")), str(failure.get("error")))
        return found

    def launch(
        self,
        name: str,
        *,
        steps: int,
        env: Mapping[str, str],
        without: Sequence[str] = (),
        overrides: Mapping[str, str | int | float | bool] | None = None,
        schedule: ArmSchedule | None = None,
    ) -> Launch:
        """A launch of what the baseline runs, with other variables."""
        profile = self.profile
        config = profile.config if "/" in profile.config else f"configs/{profile.config}"
        merged = {key: one.value for key, one in profile.env.items()} | dict(env)
        total = schedule.total_steps if schedule else steps
        return Launch(
            name=name,
            phase="step",
            kind="trainer",
            argv=(
                *("torchrun", f"--nproc_per_node={profile.ranks}", "-m", profile.trainer),
                *("--config", config, "--dataset", "synthetic", "--ddp", "1"),
                *("--steps", str(total)),
            ),
            env={key: value for key, value in merged.items() if key not in without},
            run_dir=name,
            nproc=profile.ranks,
            steps=total,
            timeout_s=_TIMEOUT_S,
            config=config,
            config_overrides={**profile.phases["baseline"].config_overrides, **(overrides or {})},
            schedule=schedule,
        )


def compare_inside(bench: Bench, variant: Variant, amount: Amount) -> dict[str, Any]:
    """Base and variant in turns within one launch: A B, B A, ..."""
    orders = [(_BASE, variant.name) if i % 2 == 0 else (variant.name, _BASE)
              for i in range(amount.rounds)]  # fmt: skip
    schedule = ArmSchedule(
        settings={_BASE: variant.against, variant.name: variant.set},
        rounds=tuple(orders),
        steps=amount.steps,
        warmup_steps=amount.warmup,
    )
    launch = bench.launch(
        f"turns_{variant.name}", steps=0, env={}, without=tuple(variant.set), schedule=schedule
    )
    result = bench.run(launch)
    if not result.ok:
        return {"problem": f"{result.status}: {result.cause}"}
    if refused := bench.refused(launch):
        # Of an arm that cannot run here that is the answer; without the base there is none.
        why = "; ".join(f"{arm} cannot run here: {text}" for arm, text in refused.items())
        return {"problem": why, "not_run": _BASE not in refused}
    rounds, _ = complete_rounds(block_throughputs(bench.log(launch)))
    base, other = (
        rounds[rounds["arm"] == arm].sort_values("block")["value"].tolist()
        for arm in (_BASE, variant.name)
    )
    return {"how": "turns in one launch", **ratio(base, other)}


def compare_launches(bench: Bench, variant: Variant, amount: Amount) -> dict[str, Any]:
    """Base and variant in launches of their own, in turn; the base is shared by equal ones."""
    base: list[float] = []
    other: list[float] = []
    shared = "_".join(f"{name}_{value}" for name, value in sorted(variant.against.items())).lower()
    for number in range(1, amount.launch_rounds + 1):
        pair = [
            (base, bench.launch(f"base_{shared}_{number}", steps=amount.launch_steps,
                                env=variant.against)),
            (other, bench.launch(f"{variant.name}_{number}", steps=amount.launch_steps,
                                 env=variant.set)),
        ]  # fmt: skip
        for values, launch in pair if number % 2 else reversed(pair):
            result = bench.run(launch)
            if not result.ok:
                return {"problem": f"{launch.name}: {result.status}: {result.cause}"}
            values.append(float(effective(bench.log(launch)).value))
    return {"how": "launches in turn", **ratio(base, other)}


def ratio(base: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """Throughput of the variant over that of the base, with its one-sided 95 % bounds."""
    decision = faster(other, base, error=0.05)
    return {
        "base_toks_per_s": list(base),
        "toks_per_s": list(other),
        "ratio": decision.estimate,
        "interval": list(decision.interval) if decision.interval else None,
        "says": decision.reason.removeprefix("a "),
    }


def throughput(bench: Bench, launch: Launch) -> dict[str, Any]:
    """Rate, peak memory and MFU of a launch; the reason where it has none."""
    result = bench.run(launch)
    if not result.ok:
        return {"problem": f"{result.status}: {result.cause}"}
    log = bench.log(launch)
    rate = float(effective(log).value)
    env = json.loads((bench.root / launch.run_dir / ENV_JSON).read_bytes())
    effective_ = env.get("effective") or {}
    peak = bench.profile.hardware.peak_tflops
    per_token = effective_.get("model_flops_per_token")
    share = rate * per_token / (peak * 1e12 * bench.profile.ranks) if peak and per_token else None
    return {
        "global_batch": effective_.get("global_batch"),
        "accumulation": effective_.get("accumulation"),
        "toks_per_s": rate,
        "step_s": float(log.frame["dt_s"].median()),
        "memory_mib": float(log.frame["mem_mib"].max()),
        "mfu": share,
    }


def fill(bench: Bench, batch: Batch) -> list[dict[str, Any]]:
    """The production batch, a larger one, and the one that two points say fills the memory.

    Production is as the profile has it; the others have one micro-batch per step.
    """
    production = bench.profile.workload.global_batch
    total_mib = (bench.profile.hardware.gpu_memory_gib or 0.0) * 1024
    rows: list[dict[str, Any]] = []
    sizes = [production, production * batch.grow]
    while sizes:
        size = sizes.pop(0)
        larger = {"train.batch_size": size, "train.accumulate_grad_batches": 1}
        overrides = larger if size != production else {}
        launch = bench.launch(f"batch_{size}", steps=batch.steps, env={}, overrides=overrides)
        row = {"batch": size, **throughput(bench, launch)}
        rows.append(row)
        if "problem" in row:
            break
        if not sizes:
            wanted = next_size(rows, batch, total_mib, bench.profile.ranks)
            sizes = [wanted] if wanted else []
    return rows


def next_size(
    rows: Sequence[Mapping[str, Any]], batch: Batch, total_mib: float, ranks: int
) -> int | None:
    """The batch at which memory reaches its share, by the line through the last two points.

    None where it is reached, or cannot grow by a quarter any more.
    """
    (first, low), (last, high) = ((row["batch"], row["memory_mib"]) for row in rows[-2:])
    slope = (high - low) / (last - first)
    if slope <= 0 or not total_mib:
        return None
    wanted = int(last + (batch.memory_share * total_mib - high) / slope)
    wanted = min(wanted, batch.largest, last * 2 * batch.grow) // ranks * ranks
    return wanted if wanted >= last * 1.25 else None


def compare(bench: Bench, variant: Variant, amount: Amount) -> dict[str, Any]:
    """One variant, in the way that its toggles allow."""
    if variant.unknown:
        return {"problem": f"not run: {'; '.join(variant.unknown)}", "not_run": True}
    inside = compare_inside if variant.in_launch else compare_launches
    return inside(bench, variant, amount)


def table(pairs: Sequence[dict[str, Any]], batches: Sequence[dict[str, Any]]) -> str:
    """Both tables, in Markdown."""
    rows = []
    for row in pairs:
        interval = row.get("interval")
        shown = f"{interval[0]:.3f} to {interval[1]:.3f}" if interval else "-"
        value = f"{row['ratio']:.3f}" if row.get("ratio") else "-"
        says = row.get("problem") or f"{row['how']}: {row['says']}"
        rows.append((row["variant"], row["set"], row["against"], value, shown, says))
    header = ("variant", "set", "against", "speed ratio", "95 % bounds", "what it says")
    text = markdown_table(header, rows)
    sizes = []
    for row in batches:
        if "problem" in row:
            sizes.append((row["batch"], "-", "-", "-", "-", row["problem"]))
            continue
        mfu = "-" if row["mfu"] is None else f"{row['mfu']:.2%}"
        numbers = (f"{row['toks_per_s']:.0f}", f"{1e3 * row['step_s']:.1f}", mfu)
        micro = f"{row['accumulation']} micro-batches per step" if row["accumulation"] != 1 else ""
        sizes.append((row["batch"], *numbers, f"{row['memory_mib']:.0f}", micro))
    names = ("global batch", "tok/s", "step ms", "MFU", "memory MiB", "")
    return f"{text}\n{markdown_table(names, sizes)}"


def summary(pairs: Sequence[dict[str, Any]], batches: Sequence[dict[str, Any]]) -> str:
    """One sentence."""
    done = [f"{row['variant']} {row['ratio']:.3f}" for row in pairs if row.get("ratio")]
    known = [row for row in batches if "problem" not in row]
    best = max(known, key=lambda row: float(row["toks_per_s"]), default=None)
    texts = [f"speed ratios: {', '.join(done) or 'none yet'}"]
    if best is not None:
        share = "" if best["mfu"] is None else f", {best['mfu']:.2%} MFU"
        texts.append(f"best batch {best['batch']}: {best['toks_per_s']:.0f} tok/s{share}")
    bad = [f"{row['variant']}: {row['problem']}" for row in pairs if row.get("problem")]
    return "; ".join([*texts, *bad])


def main(argv: Sequence[str]) -> int:
    """0 every pair has its answer, 1 a launch failed, 75 out of time."""
    program = Program(__doc__)
    args = program.parse(argv)
    file = load_pairs()
    amount, batch = file.device, file.batch
    variants = file.variants
    if args.stand_in:
        amount, batch = file.stand_in, file.stand_in_batch
        variants = tuple(v for v in variants if v.name in file.stand_in_variants)
    pairs: list[dict[str, Any]] = []
    batches: list[dict[str, Any]] = []
    with stop_on_signals(StopRequest()) as stop:
        bench = Bench(program=program, profile=load_profile(args.profile), stop=stop)
        try:
            batches = fill(bench, batch)
            for variant in variants:
                found = compare(bench, variant, amount)
                text = {key: _words(getattr(variant, key)) for key in ("set", "against")}
                pairs.append({"variant": variant.name, **text, **found})
                program.write(
                    summary(pairs, batches),
                    table(pairs, batches),
                    {"pairs": pairs, "batches": batches},
                )
        except OutOfTime:
            program.write(
                summary(pairs, batches),
                table(pairs, batches),
                {"pairs": pairs, "batches": batches},
            )
            return TO_BE_CONTINUED
    failed = [row for row in pairs if "problem" in row and not row.get("not_run")]
    # The largest batch may run out of memory: that is what was asked. The first one may not.
    return 1 if failed or not batches or "problem" in batches[0] else 0


def _words(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in variables.items())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
