"""Stage `ceilings`: what devices and links can do without a model, three times, beside the limits.

    python -m runbook.tools.acceptance.ceilings --out DIR --profile NAME [--left-s S]

`nsa.ceilings` measures, as in preflight; repeated launches show how far the numbers move by
themselves. The phase preflight judges; here a rate below a limit of the profile is named and fails,
and so does one that the device cannot have: then no other number of it is to be believed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from nsa.contract import CEILINGS_JSON, Ceiling
from runbook.config import Profile, load_profile
from runbook.folder.ceilings import CeilingsError, read_measured
from runbook.folder.names import RESULT_JSON
from runbook.launch import StopRequest, run_launch, set_aside, stop_on_signals
from runbook.launch.observer import Observer
from runbook.records import Launch, LaunchResult
from runbook.tools.acceptance.program import Program, markdown_table
from runbook.tools.acceptance.stages import TO_BE_CONTINUED

_LAUNCHES = 3
_TIMEOUT_S = 60.0
_LIMITS = {
    Ceiling.MATMUL: "ceiling_matmul_tflops",
    Ceiling.MEMORY_COPY: "ceiling_memory_gb_s",
    Ceiling.HOST_COPY: "ceiling_host_gb_s",
    Ceiling.ALL_REDUCE: "ceiling_all_reduce_gb_s",
}


def ceilings_launch(profile: Profile, number: int) -> Launch:
    """One measurement on the profile's devices."""
    start = ("torchrun", f"--nproc_per_node={profile.ranks}") if profile.ranks > 1 else ("python",)
    return Launch(
        name=f"run{number}",
        phase="ceilings",
        kind="ceilings",
        argv=(*start, "-m", "nsa.ceilings", "--device", profile.hardware.device),
        env={
            name: one.value
            for name, one in profile.env.items()
            if name.startswith(("NCCL_", "CUDA_", "OMP_"))
        },
        run_dir=f"run{number}",
        nproc=profile.ranks,
        steps=0,
        timeout_s=_TIMEOUT_S,
    )


def measured(
    document: Mapping[str, Any], profile: Profile, token: str
) -> dict[str, dict[str, Any]]:
    """Of each ceiling that is there the slowest rank's rate, and the fastest's as `most`.

    Raises CeilingsError.
    """
    found: dict[str, dict[str, Any]] = {}
    for what in _LIMITS:
        ranks = read_measured(document, what, nproc=profile.ranks, token=token)
        if ranks:
            one = ranks[0]
            found[str(what)] = {
                "rate": one.rate,
                "most": ranks[-1].rate,
                "unit": one.unit,
                "how": one.how,
            }
    return found


def judge(runs: Sequence[Mapping[str, Mapping[str, Any]]], profile: Profile) -> list[str]:
    """What is below a limit that decides in this profile, by the best of the launches.

    A rate of any rank in any launch that is above the device's peak was not measured.
    """
    problems = []
    for what, name in _LIMITS.items():
        rates = [run[what]["rate"] for run in runs if what in run]
        limit = profile.limits.get(name)
        if rates and limit is not None and limit.gated and max(rates) < limit.value:
            problems.append(f"{what} {max(rates):.4g} is below {limit.value:g} ({limit.source})")
        peak = profile.hardware.peaks.get(what)
        most = max((run[what]["most"] for run in runs if what in run), default=0.0)
        if peak is not None and (beyond := peak.beyond(most)):
            problems.append(f"{what} {most:.4g} is {beyond}: this was not measured on it")
    return problems


def table(runs: Sequence[Mapping[str, Mapping[str, Any]]], profile: Profile) -> str:
    """Each ceiling: the launches' rates and the limit, in Markdown."""
    rows = []
    for what, name in _LIMITS.items():
        found = [run[what] for run in runs if what in run]
        limit = profile.limits.get(name)
        if found:
            rates = ", ".join(f"{one['rate']:.4g}" for one in found)
            shown = f"{limit.value:g}{'' if limit.gated else ' (shown only)'}" if limit else "-"
            rows.append((what, rates, found[0]["unit"], shown, found[0]["how"]))
    return markdown_table(("ceiling", "launches", "unit", "at least", "how"), rows)


def main(argv: Sequence[str]) -> int:
    """0 measured and not below a limit, 1 below one or not measured, 75 out of time."""
    program = Program(__doc__)
    args = program.parse(argv)
    profile = load_profile(args.profile)
    runs: list[dict[str, dict[str, Any]]] = []
    problems: list[str] = []
    with stop_on_signals(StopRequest()) as stop:
        for number in range(1, _LAUNCHES + 1):
            launch = ceilings_launch(profile, number)
            folder = args.out / launch.run_dir
            if not (folder / RESULT_JSON).is_file():
                if stop.requested or program.left_s < 10:
                    return TO_BE_CONTINUED
                if folder.exists():
                    set_aside(folder, "unfinished")
                program.say(f"{launch.name} of {_LAUNCHES}")
                run_launch(launch, args.out, observer=Observer(), stop=stop, retry=False)
            result = LaunchResult.model_validate_json((folder / RESULT_JSON).read_bytes())
            if stop.requested and not result.ok:
                set_aside(folder, "unfinished")
                return TO_BE_CONTINUED
            if not result.ok:
                problems.append(f"{launch.name}: {result.status}: {result.cause}")
                continue
            try:
                document = json.loads((folder / CEILINGS_JSON).read_bytes())
                runs.append(measured(document, profile, result.run_token))
            except (OSError, ValueError, CeilingsError) as error:
                problems.append(f"{launch.name}: {error}")
            _write(program, runs, problems, profile)
    problems += judge(runs, profile)
    _write(program, runs, problems, profile)
    return 1 if problems else 0


def _write(
    program: Program,
    runs: Sequence[dict[str, dict[str, Any]]],
    problems: Sequence[str],
    profile: Profile,
) -> None:
    last = runs[-1] if runs else {}
    texts = [f"{name} {one['rate']:.4g} {one['unit']}" for name, one in last.items()]
    summary = "; ".join([*problems, ", ".join(texts) or "nothing was measured"])
    program.write(summary, table(runs, profile), {"runs": list(runs), "problems": list(problems)})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
