"""What is typed wrong is told in one line with what is right; nothing starts, nothing is made."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runbook.folder.manifest import write_manifest, write_record
from tests.cli.shell import Ended, inside
from tests.factory.programs import program
from tests.reports import samples

RUN = samples.go().run_id
ENVIRONMENT = re.compile(r"[A-Z_]+=")
# A line each: what is typed -> what the error has. RUN is the only run in artifacts/.
CASES = """
rnu -> unknown command 'rnu' (did you mean 'run'?)
zzz -> unknown command 'zzz'; there are: run, report, verify, launch, watch
help juge -> unknown command 'juge' (did you mean 'judge'?)
--versoin -> --versoin (did you mean '--version'?); options of a command come after its name; see
phases --jsn -> unknown option --jsn (did you mean '--json'?); see runbook phases --help
schema rum -> run|events|profile: invalid choice: 'rum' (choose from 'run', 'events', 'profile')
toggles NSA_DDP_BUKET_MB -> no such toggle (did you mean 'NSA_DDP_BUCKET_MB'?)
NSA_DDP_BUKET_MB=5 toggles -> NSA_DDP_BUKET_MB: no such toggle; did you mean NSA_DDP_BUCKET_MB?
NSA_DDP_COMPRESS=zip toggles -> NSA_DDP_COMPRESS='zip': allowed is off, bf16, fp16
report --format -> --format: expected one argument; see runbook report --help
report --format , -> --format ',': no such format
report --format pdf -> --format 'pdf': no such format; there are: ctrf, details, github, html, junit
report --json --format md -> --json and --format: choose one
report --out other -> no run in other/; `runbook run` starts one, --out names another folder
judge --format md,html -> --format 'md,html': no such format
judge --format json -> --format json: there is none; --json prints run.json
verify --fingerprint 3f9c -> '3f9c' is not a fingerprint; allowed: 32 to 64 digits (0-9, a-f), as
verify --fingerprint '' -> --fingerprint: expected a value, not ''; see runbook verify --help
compare 20261121 -> name the two runs to compare; in artifacts/ there are: RUN
export -> --to is needed
export --to csv -> --to: expected 2 arguments
export --to cvs x -> --to cvs: no such format (did you mean 'csv'?); see runbook export --help
export --to tensorboard b -> no such format; there are: csv, prometheus
export --to prometheus x.txt -> the collector reads only files that end in .prom
export --to csv nowhere/x.csv -> no folder nowhere/
export --to csv . -> --to csv .: is a folder; name a file in it; see runbook export --help
export --to csv artifacts/RUN/run.json -> lies in the folder of the run RUN
history --otu x -> unknown option --otu (did you mean '--out'?)
history --out absent -> no folder absent/
decide target x.csv --target 39 -> unknown command 'decide'
init --trainer t --tokens-per-rank 0 -> --tokens-per-rank: must be a whole number, 1 or more, not
init --trianer t --tokens-per-rank 8 -> unknown option --trianer (did you mean '--trainer'?); see
init --trainer t --tokens-per-rnk 8 -> unknown option --tokens-per-rnk (did you mean '--tokens-per
init --tokens-per-rank 8 -> the following arguments are required: --trainer; see runbook init --help
run -p nosuch --dry-run -> no profile 'nosuch'
run --seed -1 -> --seed: must be a whole number, 0 or more, not '-1'; see runbook run --help
report -o '' -> error: --out: must be a path, not ''; see runbook report --help
watch nosuch -> no run 'nosuch'
watch artifacts/nowhere --once -> no such directory
watch artifacts/RUN/run.json -> no such directory
run --seed 1000000000000000 -> must be a whole number, 0 or more, of at most 15 digits
watch other --once -> nothing to read:
inspect nosuch -> no run 'nosuch'
inspect pipe.yaml -> save it as a file
run --profile ./pipe.yaml --dry-run -> save it as a file
run --profile ./sparse/run.json --dry-run -> has 1099511627776 bytes, at most 67108864 are read
launch --plan ./sparse/run.json --dry-run -> has 1099511627776 bytes, at most 67108864 are read
CONFIG=HERE/sparse/run.json run --profile cpu --dry-run -> longer than 1048576 characters
launch --config sparse/run.json --profile cpu --dry-run -> longer than 1048576 characters
verify sparse -> sparse/run.json cannot be read: has 1099511627776 bytes, at most 67108864 are read
judge sparse -> sparse/run.json cannot be read: has 1099511627776 bytes, at most 67108864 are read
report sparse -> sparse/run.json cannot be read: has 1099511627776 bytes, at most 67108864 are read
run --out taken --dry-run -> --out taken: is a file, not a folder
run --phase '' --profile cpu --dry-run -> --phase: expected a value, not ''; see runbook run
run --phase smoke --dry-run -> the plan has it: `runbook launch --until smoke`
run --phase al --profile cpu --dry-run -> no phase 'al' (did you mean 'all'?)
run --profile cpu --until-s 0 -> --until-s: must be a number above 0, not '0'
run --json --output-format github -> choose one
run --dry-run --output-format github -> nothing to annotate
run --output-format xml -> 'text', 'json', 'github'
run baseline --profile cpu -> argument 'baseline' (a phase is named with --phase baseline); see
launch preflight -> unexpected argument 'preflight' (a phase is named with --until preflight); see
run basline --profile cpu -> unexpected argument 'basline'; see runbook run --help
baseline -> unknown command 'baseline' (a phase: `runbook run --phase baseline`)
NSA_DDP_BUKET_MB=7 run --profile cpu -> in this shell: NSA_DDP_BUKET_MB: no such toggle (did you
run --resume RUN --aa -> --aa cannot be combined with --resume: the run continues with its original
run --resume RUN --set train.lr=1 -> --set cannot be combined with --resume
launch --phase smoke -> unknown option --phase (here it is --until)
launch --dry-run --aa -> unknown option --aa (`runbook run` has it)
launch --profile cpu --until -> --until: expected one argument
launch --profile cpu --without-go --until '' --dry-run -> --until: expected a value, not ''; see
launch --profile cpu --until smok -> did you mean 'smoke'?); see runbook launch --help
launch --profile cpu --until zzz -> no such phase in the plan; there are: preflight, sanity, smoke
launch --profile cpu --plan prod -> no plan 'prod' (did you mean 'production'?); see
launch --profile cpu --plan zzz -> no plan 'zzz'; there are: production, validation
launch --profile cpu --plan ./pipe.yaml --dry-run -> save it as a file
launch --profile cpu --plan bad.yaml --without-go -> phases.smoke.legs: 7 do not divide 300 steps
launch --profile cpu --config none.yaml --until smoke -> no trainer config 'none.yaml'
NSA_DDP_BUCKT_MB=1 launch --profile cpu -> in this shell: NSA_DDP_BUCKT_MB: no such toggle (did you
launch --profile cpu -> production needs a GO of this configuration on this machine
launch --profile cpu --out other -> other/ has none yet: no run there was GO; first: runbook run
launch --profile cpu --out other -> ; or train only as far as extended: add --until extended
NSA_DDP_BUCKET_MB=1 launch --profile cpu -> --set NSA_DDP_BUCKET_MB=1; or train
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A run, one whose record has no end, a pipe, a plan that is wrong in itself, and others."""
    run = tmp_path / "artifacts" / RUN
    run.mkdir(parents=True)
    write_record(run, samples.go())
    write_manifest(run)
    (tmp_path / "bad.yaml").write_text("extends: production\nphases: {smoke: {legs: 7}}\n")
    (tmp_path / "taken").write_text("")
    (tmp_path / "other").mkdir()
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "sparse").mkdir()
    (tmp_path / "sparse/run.json").touch()
    os.truncate(tmp_path / "sparse/run.json", 1 << 40)
    return tmp_path


def refused(here: Path, *words: str, **variables: str) -> Ended:
    """Exit code 2, one line on stderr, nothing on stdout, and nothing made."""
    before = sorted(here.rglob("*"))
    ended = inside(*words, cwd=here, **variables)
    assert (ended.code, ended.out, sorted(here.rglob("*"))) == (2, "", before)
    *_, last = ended.err.splitlines()
    assert last.startswith("runbook: error: ") and "internal error" not in last
    return ended


@pytest.mark.parametrize("case", CASES.strip().splitlines())
def test_one_slip_is_one_problem(here: Path, case: str) -> None:
    """What it was typed for is not called missing as well."""
    typed, told = case.replace("HERE", str(here)).replace("RUN", RUN).split(" -> ")
    words = shlex.split(typed)
    variables = [word for word in words if ENVIRONMENT.match(word)]
    shell = dict(word.split("=") for word in variables)
    assert told in refused(here, *words[len(variables) :], **shell).err.splitlines()[-1]


@pytest.mark.parametrize(
    "words",
    [
        *("watch artifacts/latest --wait 3", "watch artifacts/latest --halts", "run --gpus 2"),
        *("watch artifacts/latest --stop", "launch --wait", "launch --without-og"),
    ],
)
def test_no_option_that_acts_and_none_of_another_word_is_proposed(here: Path, words: str) -> None:
    ended = refused(here, *words.split())
    assert "unknown option" in ended.err and "did you mean" not in ended.err


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        ("report --out other", "`{} run` starts one"),
        ("run --phas x", "; see {} run --help"),
        ("launch --profile cpu", "; first: {} run --phase all --profile cpu; or"),
        ("baseline", "(a phase: `{} run --phase baseline`)"),
    ],
)
def test_a_refusal_names_what_its_reader_can_type(
    here: Path, monkeypatch: pytest.MonkeyPatch, words: str, typed: str
) -> None:
    """As from an environment that is not activated; the program's own name stays in front."""
    script = program(here / "my env" / "runbook", "true")
    monkeypatch.setattr(sys, "argv", [str(script)])
    told = refused(here, *words.split(), PATH="/usr/bin:/bin").err.splitlines()[-1]
    assert typed.format("'my env/runbook'") in told


@pytest.mark.parametrize("command", ["run", "launch", "triage", "report"])
@pytest.mark.parametrize("out", ["", "x\nGO (forged)"])
def test_a_folder_is_one_line_of_text(here: Path, command: str, out: str) -> None:
    problem = r"without line breaks and control characters, not 'x\nGO" if out else "a path, not ''"
    assert f"--out: must be {problem}" in refused(here, command, "--out", out).err


@pytest.mark.parametrize("name", ["NCCL_DEBUG_FILE", "data.local_path", "CONFIG"])
@pytest.mark.parametrize("command", ["run", "launch"])
def test_no_setting_prints_a_line_of_its_own(here: Path, command: str, name: str) -> None:
    ended = refused(here, command, "--dry-run", "--set", f"{name}=/x\nGO (forged)")
    assert f"--set {name}: must be without line breaks and control characters" in ended.err
    if name != "data.local_path":
        ended = refused(here, command, "--dry-run", **{name: "/x\x1b[2K\nGO (forged)"})
        assert f"in this shell: {name}: must be without line breaks" in ended.err


@pytest.mark.parametrize("words", [("--out", "\udcff"), ("--set", "NCCL_DEBUG_FILE=\udcff")])
def test_bytes_that_are_no_text_start_nothing(here: Path, words: tuple[str, ...]) -> None:
    ended = refused(here, "run", "--profile", "cpu", "--phase", "preflight", *words)
    assert "is not UTF-8 text (or the locale is not), and a run's files are" in ended.err


def test_everything_wrong_with_a_run_in_one_message(tmp_path: Path) -> None:
    ended = inside(
        *("run", "--phase", "basline,nope", "--profile", "h200x2", "--set", "NSA_DDP_BUKET_MB=5"),
        *("--set", "train.stepz=2", "--steps-scale", "abc", "--protocol", "bloks", "--sed", "3"),
        *("--gpu-hour-price", "-1", "--seed", "x"),
        cwd=tmp_path,
    )
    assert (ended.code, ended.out) == (2, "")
    first, *rest = ended.err.splitlines()
    assert first == "runbook: error: 10 problems:"
    expected = (
        "--steps-scale: must be a number above 0, not 'abc'",
        "--gpu-hour-price: must be a number, 0 or more, not '-1'",
        "--seed: must be a whole number, 0 or more, not 'x'",
        "unknown option --sed (did you mean '--seed'?)",
        "no profile 'h200x2' (did you mean 'h200x2_nvlink'?); all: `runbook profiles`",
        "--set NSA_DDP_BUKET_MB: no such toggle or config key (did you mean 'NSA_DDP_BUCKET_MB'?)",
        "--set train.stepz: no such toggle or config key (did you mean 'train.steps'?)",
        "no phase 'basline' (did you mean 'baseline'?)",
        "no phase 'nope'; there are: ",
        "--protocol 'bloks': no such protocol (did you mean 'blocks'?); see",
    )
    assert len(rest) == len(expected)
    for line, start in zip(rest, expected, strict=True):
        assert line.startswith(f"  - {start}")
    assert rest[-1].endswith("see runbook run --help")
    assert list(tmp_path.iterdir()) == [], "a refused run leaves nothing behind"


# Of each kind the first two places refuse new entries, also to root.
FOLDERS = ("/proc/x", "/sys/x", "taken/x")
MADE = (
    "drill --faults exit",
    "init --tokens-per-rank 8 --profile cpu --trainer 'true {steps}'",
    "run --phase preflight --profile cpu",
)


@pytest.mark.parametrize("place", FOLDERS)
@pytest.mark.parametrize("words", MADE)
def test_a_folder_that_cannot_be_made(here: Path, words: str, place: str) -> None:
    ended = refused(here, *shlex.split(words), "--out", place)
    told = f"error: --out ({here}/)?{place}[^ ]*: no folder can be made there: "
    assert re.search(told, ended.err)
    assert ended.err.endswith("; name a folder that can be written\n")


@pytest.mark.parametrize("place", FOLDERS[:2])
@pytest.mark.parametrize("fmt", ["csv", "prometheus"])
def test_a_file_that_cannot_be_written(here: Path, fmt: str, place: str) -> None:
    target = f"{place}.prom" if fmt == "prometheus" else place
    ended = refused(here, "export", "--to", fmt, target)
    assert f"error: --to {fmt} {target}: cannot be written: " in ended.err
    assert ended.err.endswith("; name a place that can be written\n")


def test_a_new_folder_where_there_is_one(here: Path) -> None:
    drill = refused(here, "drill", "--faults", "exit", "--out", "artifacts")
    assert f"--out {here / 'artifacts'}: is there already; name a new folder" in drill.err


def test_a_run_that_may_not_be_read_is_no_run_that_was_changed(here: Path) -> None:
    """Root may read everything, unless that is taken from it."""
    bound = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    if os.geteuid() == 0 and shutil.which(bound[0]) is None:
        pytest.skip("no `setpriv` here to take from root that it reads everything")
    listed = here / "artifacts" / RUN / "MANIFEST.sha256"
    listed.chmod(0)
    for words in (["verify"], ["judge"], ["report"], ["compare", RUN]):
        done = subprocess.run(
            [*bound[: 2 * (os.geteuid() == 0)], sys.executable, "-P", "-m", "runbook", *words, RUN],
            cwd=here,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (2, ""), words
        assert f"{listed.name}: Permission denied" in done.stderr
