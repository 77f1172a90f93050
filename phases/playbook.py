"""What to do about each kind of failure: requirements T1 to T15 and C5, as data.

Each begins with the first thing to try, and has parts that are said only where they fit: advice on
GPUs, NCCL, several ranks or bf16 is none where there are none. A finding that names its topic takes
that one's remedy: it knows the fault, such as the end of a launch. Any other row that is not PASS
takes the remedy of its own topic if there is one, else that of its reason.
"""

from __future__ import annotations

from phases.common.machine_remedies import MACHINE
from phases.common.situation import (
    Advice,
    Remedy,
    Situation,
    anywhere,
    cpu,
    fitting,
    foreign,
    gpu,
    in_bf16,
    in_full,
    knowing_lr,
    long,
    nccl,
    not_knowing_lr,
    one_gpu,
    pcie,
    several,
    short,
    told,
)
from runbook.records import Reason

# A process writes them only if it is asked to.
_DUMPS = anywhere(
    "with --set NSA_MEM_DUMP_EVERY=20, read in `{folder}/mem_*.json` what grows",
    settings=["NSA_MEM_DUMP_EVERY=20"],
)

_TRAINING: dict[str, Remedy] = {
    "environment": (
        "correct what the message names on this machine, or choose its profile (`runbook "
        "profiles`). The trainer itself was not tested"
    ),
    # Requirements T1 and C5.
    "throughput": (
        nccl("set NSA_DDP_BUCKET_MB=50"),
        one_gpu(
            "a GPU that idles waits for the host that feeds it: the nvtx phase names what the host "
            "does; replay the layers (NSA_CUDA_GRAPHS=1) and set NSA_OPT_FUSED=1"
        ),
        gpu("keep flash enabled (no NSA_SDPA_NO_FLASH)"),
        cpu("keep NSA_PREFILL_BATCHED=1, and see that nothing else takes the CPUs (top)"),
        "switch tracing and TensorBoard off",
        pcie("on PCIe keep the batch at 2 and raise NSA_ACCUM instead"),
        one_gpu("raise train.batch_size as far as memory_headroom allows"),
    ),
    "busy": anywhere(
        "end the other work on this machine (`top` shows it), or run when it is quiet. Times of "
        "two runs under different load compare badly",
        command="top",
    ),
    # Requirements T2 and T7.
    "stall": (
        "read the stack of the silent rank and its last heartbeats: stackdump_rank*.txt and "
        "incident.json in `{folder}` show where it stopped",
        "if it hangs again, type `runbook` in a second terminal meanwhile: it prints the `runbook "
        "watch --stacks` command of that run, which shows the stack of every rank",
        nccl(
            "run again with --set NCCL_DEBUG=INFO, for a short window",
            settings=["NCCL_DEBUG=INFO"],
        ),
    ),
    "frozen": (
        "look at what holds the process: the state in incident.json (T: stopped by a signal or a "
        "debugger, D: the kernel waits for a disk, a network share or the driver) and the kernel "
        "log. The trainer itself was not at work"
    ),
    "nodes": (
        "take the node that the message names out of the partition (`scontrol update "
        "nodename=NAME state=drain reason=...`) or make it like the others, then run the phase "
        "again; a job that waits: `scontrol show job`, `sinfo -N -l`"
    ),
    "desync": (
        "read the two operations that the message names in the ranks' flight records: one rank "
        "took another branch (data, a rank-dependent `if`, an exception that was caught). Make "
        "every rank issue the same collectives"
    ),
    "crash": (
        "read the error and its traceback in console.log, then the stack of the rank that the "
        "message names",
        "`runbook triage` finds the setting that makes it go away",
    ),
    "at_exit": (
        "every step was trained. Then a thread of torch (gloo's) gave a Python object back while "
        "the interpreter was already ending, which a busy machine makes likely. It is a failure "
        "all the same: torchrun ends the other ranks, and whoever started it sees no 0",
        "let the script end with `sys.stdout.flush(); os._exit(0)` after destroy_process_group(): "
        "that alone is not enough while a model under DistributedDataParallel holds the group",
    ),
    "timeout": (
        "see in `{folder}/training.csv` whether it made progress: if so, run fewer steps "
        "(--steps-scale 0.5), if not, read the stacks in the evidence"
    ),
    "silent": (
        "read the end of console.log: the process started and wrote neither a line nor a "
        "heartbeat. Try the same command by hand (launch.json has it)"
    ),
    "halted": (
        "read .anomaly_type and anomalies.jsonl: they name the reading at which a watcher halted "
        "it, or a person wrote .HALT"
    ),
    "preempted": (
        "find who sent SIGTERM (a scheduler's time limit, an operator, another job's cleanup), "
        "then continue with --resume: what had finished is not repeated, and a launch that resumes "
        "another begins at its checkpoint"
    ),
    "interrupted": "continue the run with --resume; what had finished is not repeated",
    "plan_collects_nothing": (
        "add the phase preflight to the plan (`preflight: {}` below its phases), or take this row "
        "out of the phase's checks"
    ),
    "not_run": "fix what the message names first: this was not started because of it",
    "config": (
        "correct the setting that the message names (--set, the profile or the config file). The "
        "trainer itself was not tested"
    ),
    # Requirement T3.
    "v2": "train with NSA_SEL_RANGES_V2=0 until the parity tests pass again",
    # Requirement T4.
    "fused": "leave NSA_OPT_FUSED unset",
    # Requirement T5; balance: T13.
    "compression": (
        "set NSA_DDP_COMPRESS=bf16 and look for the line '[ddp] gradient compression enabled'; "
        "if it deadlocks, NSA_DDP_COMPRESS=off with NSA_DDP_BUCKET_MB=100"
    ),
    "regression": (
        "`runbook compare` this run with the one that the row names (code, software, settings, "
        "load); `runbook history baseline.throughput` shows when it began. A loss that is meant is "
        "accepted with a profile of your own (`accepted_loss`, gated: false) or another --out"
    ),
    "earlier_run": (
        "`runbook verify` of the run that the row names tells what differs: put those files back "
        "and run the phase again. If they are lost, move that folder out of --out, so that nothing "
        "is held against it any more, or continue it with --resume if it was cut off"
    ),
    "balance": (
        "NSA_DDP_STATIC_GRAPH=1 with NSA_DDP_FIND_UNUSED=0, then larger buckets, then a larger "
        "batch or more accumulation"
    ),
    "bucket": (
        "use bucket sizes below the size of the model's gradients, so that there is more than one"
    ),
    # Requirement A2.
    "audit": (
        "set NSA_SDPA_AUDIT=1 with NSA_PREFILL_BATCHED=1 and run at least one step in which the "
        "branches are exercised; only rank 0 logs it"
    ),
    "kernels": (
        gpu(
            "compare with NSA_SDPA_NO_FLASH=1 and check torch, driver and the profile's expected "
            "kernels"
        ),
        cpu("check torch's build and the profile's expected kernels"),
        "a fallback costs speed, two unusable paths are a no-go",
    ),
    # Requirement N4.
    "nvtx": (
        "shorten the run to 50 steps with NSA_TB_DISABLE=1 and NSA_DISABLE_AUX_STATS=1; "
        "check that NSA_SEL_RANGES_V2=1"
    ),
    "python": (
        "look at the named Python functions in the trace; NSA_PREFILL_BATCHED=1 and "
        "NSA_SEL_RANGES_V2=1 remove the two known loops"
    ),
    # Requirements S4 and S5.
    "scaling": (
        "capture an nvtx run of both sides",
        "sweep the buckets",
        pcie("check the PCIe width"),
        nccl("check NCCL's choice of ring"),
        cpu("give each rank cores of its own"),
        "check that both sides ran the same batch, checkpointing and toggles",
    ),
    "node_scaling": (
        "where E falls between one node and two it is the network or its settings (`preflight` has "
        "rows `interconnect`, `all_reduce` and, from three nodes on, `slow_node`); where it falls "
        "later it is the switch, or one of the nodes that came with that number",
        nccl("NCCL_DEBUG=INFO tells which interface NCCL took"),
        "sweep the buckets",
    ),
    # Requirement T12.
    "memory": (
        long("reduce train.seq_len to 1024"),
        short("reduce train.seq_len"),
        foreign("shorten its sequences, or make its batch smaller"),
        "accumulate more (NSA_ACCUM)",
        several("allow gradient checkpointing under DDP with NSA_DDP_DISABLE_GC=0"),
        _DUMPS,
    ),
    "host_memory": (
        gpu("free memory of the host, not of the GPU"),
        "end other processes, raise the container's memory limit, or use fewer ranks: the kernel "
        "killed the process",
    ),
    "leak": (
        _DUMPS,
        "find in the code what grows from step to step: a list that keeps tensors or losses with "
        "their graphs, a cache, a loader's queue. A smaller batch only delays it",
    ),
    # Requirement E1.
    "prefill": anywhere(
        "set NSA_PREFILL_BATCHED=1: sequential prefill loops in Python over tokens",
        settings=["NSA_PREFILL_BATCHED=1"],
    ),
    # Requirements G5 and T15.
    "loss": (
        knowing_lr(
            "run the phase with a tenth of the learning rate, --set train.lr={lower_lr}",
            settings=["train.lr={lower_lr}"],
        ),
        not_knowing_lr("run the phase with train.lr lowered to a tenth (--set train.lr or NSA_LR)"),
        in_bf16(
            "then with bf16 off (runtime.precision=fp32): a loss that is not finite in bf16 is a "
            "no-go"
        ),
        in_full("see in `{folder}/training.csv` at which step loss and grad_norm begin to diverge"),
    ),
    "plausible": (
        "do not use these numbers; check which config, data and trainer really ran (env.json) "
        "and whether the attention is causal (the parity tests)"
    ),
    "workload": (
        "the profile was made for the workload that it names, and its limits hold for that one: "
        "take the setting back, or write a profile of your own (extends: this one) whose "
        "`workload` says what is trained"
    ),
    "accounts": (
        "do not use these numbers: the files named as evidence tell different things about the "
        "same steps. Find out which of them is wrong, and fix how the trainer writes it"
    ),
    "settings": (
        "the trainer does not run with a setting that it was given. The row names the setting, the "
        "value asked for and what was seen: follow that value through the trainer's code to the "
        "call that takes it (NSA_DDP_BUCKET_MB to DistributedDataParallel as bucket_cap_mb, "
        "NSA_PG_TIMEOUT_MIN to init_process_group as timeout), and look for calls that change it "
        "(torch.set_num_threads)"
    ),
    "saves": (
        "look at the condition under which the trainer begins a save: it has to hold after every "
        "step that train.save_every divides, counted over the whole run and not from a resume, and "
        "where the save before is still under way it has to wait, not to leave this one out. Each "
        "event `checkpoint` in `{folder}/heartbeat_rank0.jsonl` is one that was written. Begin no "
        "long run before: what ends it costs more steps than save_every"
    ),
    "evaluations": (
        "look at the condition under which the trainer evaluates: it has to hold after every step "
        "that train.eval_every divides, counted over the whole run and not from a resume. What is "
        "left out is no reading of how the run generalizes, and keep_best chooses among fewer "
        "checkpoints"
    ),
    "gradients": (
        "the row names the rank, the parameters or the type: look at how the trainer wraps the "
        "model, registers its hook and steps the optimizer, and at the learning rate"
    ),
    "left_over": (
        "clear the gradients after every update (`optimizer.zero_grad(set_to_none=True)`), and "
        "leave none between two steps: each step follows the sum of all earlier gradients now"
    ),
    "learns": (
        "look at train.lr and its warm-up in env.json, at the row `gradients`, and at the loss in "
        "the report's curve: a flat one means that nothing is learned, whatever the throughput"
    ),
    "oracle": (
        "run `pytest --pyargs nsa.tests.test_whole_model` to see which part differs from the "
        "equations; do not train until it agrees"
    ),
    "first_weights": (
        "look at how the trainer draws its weights: normal with a deviation of 0.02, of what "
        "writes into the residual stream (out_proj, down) 0.02 / sqrt(2 layers), norms 1, biases "
        "0, each with numbers of its own and the same on all ranks (docs/trainer-contract.md, "
        "First weights). The row names the parameters and what they begin with"
    ),
    "beginning": (
        "let every rank call `torch.manual_seed` with train.seed before it builds the model, and "
        "draw nothing in between; then see how weights, norms, gates and the schedule begin (the "
        "failing assertion is in junit.xml). No run can be repeated now"
    ),
    "safeguards": (
        "read the failing assertion in junit.xml: it tells what the trainer did with a number that "
        "is not finite, or which checkpoints it kept. Start no long run until it passes: it would "
        "train on NaN, or lose its best checkpoint"
    ),
    "checkpoints": (
        "read the failing assertion in junit.xml: it names the test, and with it what a save "
        "lacks, which checkpoints stayed, or what was not restored (data position, random states, "
        "optimizer, schedule). Look at how the trainer saves and resumes. Start no run that has to "
        "survive an interruption until it passes"
    ),
    "stopping": (
        "read the console and the last lines of the heartbeats (of a test: the failing assertion "
        "in junit.xml): they tell whether the ranks heard of the signal or the file .HALT, agreed "
        "on a step, and saved it. Start no run under a "
        "scheduler, or that a watchdog is to halt, until this passes: its last steps would be lost"
    ),
    "self_test": (
        "attention.self_test in env.json has the errors by tensor",
        gpu(
            "check the GPU (ECC, Xid), the driver and torch's build; NSA_WINDOW=masked instead of "
            "varlen, NSA_USE_TRITON_SEL=0 instead of triton trains without that kernel, and says so"
        ),
    ),
    "untested": gpu(
        "leave NSA_SELF_TEST at auto and NSA_PREFILL_BATCHED at 1, so that the trainer holds "
        "attention on this GPU against the equations, at its own length and type, before it trains"
    ),
    "selection": (
        "no training changes how many blocks a query reads: leave the learning rate alone. Where "
        "the row `oracle` passes, the choice itself is right and its statistics are wrong: look at "
        "how they count (padding is no block) in `gate_numbers` of nsa/layer.py. Where `oracle` "
        "fails too, look at how blocks are chosen"
    ),
    "gates": (
        "lower the learning rate, check the gate shares in gates.csv for the branch that died, "
        "and resume from a checkpoint before the collapse"
    ),
    "steady": (
        "look for the change point in training.csv: data stalls (fetch_s), checkpoints, other "
        "processes",
        gpu("then clocks and temperature of the GPUs"),
    ),
    "data": (
        "run with --dataset synthetic to isolate, then raise --loader-timeout moderately and use a "
        "local cache (--dataset local --local-path)"
    ),
    "sanity": "read the failing assertion in junit.xml; do not train until it passes",
    "test_device": gpu(
        "let torch see the GPU (row preflight.cuda), then run the phase again: on a CPU these "
        "tests run other kernels than training does"
    ),
    "unnamed_device": (
        "run the phase again by its own command, whose plugin nsa.tests.told_device records each "
        "test's device in junit.xml; look there at who wrote the file"
    ),
    "resume": (
        "compare the two launches' env.json (config, toggles, software, notes): data position, "
        "random states, optimizer or schedule were not restored as they were; do not start a run "
        "that has to survive an interruption"
    ),
    "reference": (
        "pin another reference in configs/nightly.yaml: a good commit whose trainer still runs "
        "here, with this config and this contract"
    ),
    "quiet": (
        "let the night have the machine to itself: a ratio of launches beside other work finds "
        "only large losses"
    ),
    "slower": (
        "the ratio is real at the declared error: find the commit with `git bisect run runbook run "
        "--phase regression --reference COMMIT --partial-exit 0` (git takes any other code for "
        "bad); where the loss is wanted, pin another reference"
    ),
    "target": (
        "measure a healthy run of this config once, and write its throughput and date into a "
        "profile of your own as the new floor"
    ),
}

BY_TOPIC: dict[str, Remedy] = {**_TRAINING, **MACHINE}

BY_REASON: dict[Reason, Remedy] = {
    Reason.BELOW_LIMIT: "compare with the baseline phase and the profile's hardware, then rerun",
    Reason.ABOVE_LIMIT: "compare with the baseline phase and the profile's hardware, then rerun",
    Reason.MISMATCH: "read both sides in the evidence, correct the one that is wrong, rerun",
    Reason.UNDECIDED: "run it again on a quiet machine, or with more steps (--steps-scale 2)",
    Reason.TOO_FEW_SAMPLES: "run more steps (--steps-scale 2) or more launches",
    Reason.NOT_COMPARABLE: (
        "run both sides in one run of the program, with one config and checkout"
    ),
    Reason.NOT_PLAUSIBLE: BY_TOPIC["plausible"],
    Reason.UNBALANCED: BY_TOPIC["accounts"],
    Reason.NOT_LEARNING: BY_TOPIC["gradients"],
    Reason.NO_EFFECT: ("check the toggle's value and whether this path reads it (runbook toggles)"),
    Reason.WRONG_ENVIRONMENT: "fix what the row names, or choose the profile of this machine",
    Reason.DAMAGED_ARTIFACT: (
        "run the phase again into a new run; keep the damaged file for study"
    ),
    Reason.MISSING_ARTIFACT: (
        "the row says what is missing: of a launch, read its console.log and check free disk "
        "space; of the machine, install the tool named or choose its profile; then rerun"
    ),
    Reason.CRASH: BY_TOPIC["crash"],
    Reason.HANG: BY_TOPIC["stall"],
    Reason.TIMEOUT: BY_TOPIC["timeout"],
    Reason.NON_FINITE: BY_TOPIC["loss"],
    Reason.OUT_OF_MEMORY: BY_TOPIC["memory"],
    Reason.LEAK: BY_TOPIC["leak"],
    Reason.FLAKY: (
        "read the stacks of the first attempt (the folder that ends in .attempt1), then run the "
        "phase again; `runbook triage` tells a fault that comes and goes from a busy machine"
    ),
    Reason.HALTED: BY_TOPIC["halted"],
    Reason.NOT_RUN: "run the phase together with those that it needs; the rerun line names them",
    Reason.INTERRUPTED: BY_TOPIC["interrupted"],
    Reason.HARNESS_ERROR: "read the traceback named as evidence; this is a fault of the program",
    Reason.NEEDS_CUDA: "run on a machine with a CUDA device",
    Reason.NEEDS_GPUS: "run on a machine with more GPUs",
    Reason.NEEDS_CONTRACT: "give the trainer the contract (docs/trainer-contract.md)",
    Reason.NOTHING_COLLECTED: "check that the shipped tests (nsa.tests) are installed",
    Reason.TEST_FAILED: BY_TOPIC["sanity"],
    Reason.WARNING: "nothing has to be done; read the reason",
}


# Whatever a row is about, these are fixed first: only then its own topic's advice applies.
_FIXED_FIRST = frozenset(
    {
        Reason.CRASH,
        Reason.HANG,
        Reason.TIMEOUT,
        Reason.NON_FINITE,
        Reason.OUT_OF_MEMORY,
        Reason.LEAK,
        Reason.HALTED,
        Reason.FLAKY,
        Reason.NOT_RUN,
        Reason.INTERRUPTED,
        Reason.HARNESS_ERROR,
        Reason.DAMAGED_ARTIFACT,
        Reason.MISSING_ARTIFACT,
        Reason.TOO_FEW_SAMPLES,
        Reason.NOT_COMPARABLE,
    }
)


def remedy_for(topic: str, code: Reason, now: Situation, *, own: str = "") -> str:
    """The remedy of what a finding names as its `own` topic, else of its row's topic or reason.

    Only what fits the situation; where nothing of a topic does, what the reason asks for.
    """
    return told(_remedy(topic, code, now, own), now)


def first_of(topic: str, code: Reason, now: Situation, *, own: str = "") -> Advice | None:
    """The part of the same remedy that has something to type before anything else."""
    parts = fitting(_remedy(topic, code, now, own), now)
    return next((one for one in parts if one.command or one.settings), None)


def _remedy(topic: str, code: Reason, now: Situation, own: str) -> Remedy:
    its = own or (topic if topic in BY_TOPIC and code not in _FIXED_FIRST else "")
    remedy = BY_TOPIC[its] if its else ()
    return remedy if fitting(remedy, now) else BY_REASON.get(code, ())
