"""Every limit of the shipped phases, declared once; profiles give the values.

A new limit is one declaration here, its name in the `limits` of the phase that reads it, and one
line in `configs/profiles/a100x2_pcie4.yaml`, which the others extend.
"""

from __future__ import annotations

from runbook.config.limits import IDLE_MFU, FixedRule, LimitSpec, LimitUse
from runbook.config.profile import MOST_OF_PEAK
from runbook.records import Comparator


def _gate(
    name: str,
    comparator: str,
    unit: str,
    meaning: str,
    use: LimitUse = LimitUse.GATE,
    *,
    toggle: str = "",
) -> LimitSpec:
    return LimitSpec(
        name=name,
        comparator=Comparator(comparator),
        unit=unit,
        meaning=meaning,
        use=use,
        toggle=toggle,
    )


THROUGHPUT = _gate("throughput", ">=", "tok/s", "floor of the production config, all ranks")
THROUGHPUT_AIM_LOW = _gate(
    "throughput_aim_low", ">=", "tok/s", "lower end of the band aimed at", LimitUse.AIM
)
THROUGHPUT_AIM_HIGH = _gate(
    "throughput_aim_high", "<=", "tok/s", "upper end of the band aimed at", LimitUse.AIM
)
ACCEPTED_LOSS = _gate(
    "accepted_loss", "<=", "", "loss of throughput against runs that were accepted before"
)
MFU_FLOOR = _gate("mfu_floor", ">=", "", "share of the devices' peak that the model's FLOPs use")
MFU_OF_CEILING = _gate(
    "mfu_of_ceiling", ">=", "", "share of the matrix product measured by preflight"
)
GPU_UTILISATION = _gate("gpu_utilisation", ">", "%", "of the least busy GPU")
GPU_IMBALANCE = _gate(
    "gpu_imbalance", "<=", "percentage points", "between the busiest and the least busy GPU"
)
MEMORY_HEADROOM = _gate("memory_headroom", ">", "%", "free on the fullest GPU at its fullest")
SCALING = _gate(
    "scaling", ">=", "", "E = T_N / (N x T_1) at the same batch per GPU, of GPUs and of whole nodes"
)
FUSED_MARGIN = _gate(
    "fused_margin", "<=", "", "loss of speed that is not worth a switch", LimitUse.RULE
)
LOSS_PARITY = _gate("loss_parity", "<=", "nats", "between plain and fused AdamW", LimitUse.RULE)
PYTHON_SHARE = _gate(
    "python_share",
    "<=",
    "",
    "share of a step that Python costs; on a GPU: that it waits for Python",
)
PYTHON_HOTSPOT = _gate("python_hotspot", "<=", "", "share of the costliest Python function")
DRIFT = _gate("drift", "<=", "", "change of the step time from beginning to end")
STALL_SHARE = _gate(
    "stall_share", "<=", "", "share of the time in stalls: pauses whole, slow steps what they lose"
)
LEARNED_SHARE = _gate(
    "learned_share", ">=", "", "of the way from ln(V) to the entropy rate of the long run's data"
)
# The watchdog halts where the mean over the layers is beyond them; the row asks it of every layer.
GATE_ENTROPY_MIN = _gate(
    "gate_entropy_min",
    ">=",
    "",
    "entropy of the branch gates over ln 3, of every layer",
    toggle="NSA_WATCH_GATE_ENTROPY_MIN",
)
GATE_MAX_SHARE = _gate(
    "gate_max_share",
    "<=",
    "",
    "largest share of one branch, of every layer",
    toggle="NSA_WATCH_GATE_MAX_THRESHOLD",
)
GATE_COLLAPSE_READINGS = _gate(
    "gate_collapse_readings",
    "<",
    "readings",
    "bad readings in a row: a collapse",
    LimitUse.RULE,
    toggle="NSA_WATCH_GATE_COLLAPSE_N",
)
MEMORY = _gate("memory_gib", "<", "GiB", "peak of any rank, and projected to the last step")
CHECKPOINT_SHARE = _gate(
    "checkpoint_share", "<=", "", "share of the training time that writing checkpoints takes"
)
LOADER_FETCH = _gate("loader_fetch_s", "<=", "s", "the slowest batch of the loader's test")
FLAKY_LAUNCHES = _gate(
    "flaky_launches",
    "<=",
    "launches",
    "of one phase that finished only at a second attempt",
    LimitUse.RULE,
)
DISK_FREE = _gate("disk_free_gib", ">=", "GiB", "free where the artifacts go")
DISK_WRITE = _gate("disk_write_mib_s", ">=", "MiB/s", "written and synced there")
GPU_IDLE_MEMORY = _gate("gpu_idle_memory_mib", "<=", "MiB", "in use before the run")
CEILING_MATMUL = _gate(
    "ceiling_matmul_tflops", ">=", "TFLOP/s", "large matrix product on the slowest device"
)
CEILING_MEMORY = _gate(
    "ceiling_memory_gb_s", ">=", "GB/s", "copy in the slowest device's memory, read + written"
)
CEILING_HOST = _gate(
    "ceiling_host_gb_s", ">=", "GB/s", "copy from pinned host memory to the slowest device"
)
CEILING_ALL_REDUCE = _gate(
    "ceiling_all_reduce_gb_s", ">=", "GB/s", "bus bandwidth of a large all-reduce, slowest rank"
)

# -- the same on every machine: physics, and error rates fixed in the code -------------------------

# A fresh model predicts about uniformly, so its first loss is near ln(vocabulary). Wide enough for
# any sane initialization, narrow enough to see a resumed or a wrong model.
START_TOLERANCE = 0.15
# A cross-entropy is never negative, and a model that does worse than this many times ln(vocabulary)
# is no model: such a row was not measured.
LOSS_MOST = 10.0
# The same weights and the same rows, in two batch shapes: only rounding differs.
FIRST_LOSS_TOLERANCE = 0.002
# Least slack under the loss floor, in nats: sampling noise of a mean over a window.
FLOOR_SLACK = 0.01
# toks_per_s is written with finite digits.
RATE_TOLERANCE = 0.01
# Half-width of what one more baseline launch may give: the worst launch-to-launch noise of a
# healthy machine, so that three lucky launches do not make every later one invalid.
CONTROL_LEAST = 0.05
# Smaller matrices do not fill these cards, and smaller copies stay in their caches (L2: 40 MB of an
# A100, 50 MB of an H100 or H200, by the data sheets).
LEAST_MATRIX, LEAST_COPY_MIB = 4096, 256
# Cards of one kind differ by some percent in what they reach. One that falls this far behind
# another holds all ranks back, and no scaling shows it where it is GPU 0, which runs alone too.
CARDS_ALIKE = 0.85
# Clocks of nodes: one of NTP is right within milliseconds, and lateness of 20 ms is told.
CLOCKS_APART_S = 1.0
CLOCKS_EXACT_S = 0.02
# A card sold as 80 GB shows a little less than 80 GiB.
MEMORY_SHARE = 0.95
# More retries than this lower the bandwidth of a link: NVIDIA DCGM, dcgm_gpu_hardware_limits.h, the
# largest rate recommended. A launch under a minute may have as many as one of a minute.
PCIE_REPLAYS_PER_MINUTE = 8
# Documents about a launch's GPUs and kernel tell whole seconds, and are written right before it
# starts and right after it ends: all their questions together may take 50 s.
TAKEN_EARLY_S, TAKEN_LATE_S = 2.0, 60.0
# A thermal or power slowdown in more of the samples than this changes the mean pace.
THROTTLED_SHARE = 0.05
# A power limit under this share of the card's own was set by somebody, and holds its clocks down.
POWER_LEAST = 0.95
# Choice: at its own power limit a dense load costs a card some of its highest clock, and never this
# much. Only samples of a GPU that works count: resting, it has a low clock by right.
CLOCK_LEAST, WORKING_PERCENT = 0.60, 50.0
# A process of somebody else that is seen once may have been about to end.
OTHERS_SAMPLES = 2
# Shared memory for NCCL between processes, and for the batches of loaders: under it, both fail.
SHM_LEAST_GIB = 1.0
# Of the processors: work of others that takes this much shows in a host-bound trainer's pace.
BUSY_SHARE = 0.5
# Of all CPUs, over a timed launch: what others take shows in the times from about here on.
OTHER_WORK_SHARE = 0.2
# Token-by-token prefill hung at this step (E1), so a loss counts from the next one.
SEQUENTIAL_HANG_STEP = 5
# The same steps from a checkpoint: on a GPU sums are in no fixed order, so rounding differs.
RESUMED_TOLERANCE = 0.002
# What a production run keeps.
CHECKPOINTS_KEPT = 10
# From this length on, token-by-token prefill looks like a hang (E1).
LONG_SEQUENCE = 1024


def _fixed(what: str, rule: str, why: str) -> FixedRule:
    return FixedRule(what=what, rule=rule, why=why)


MACHINE = (
    _fixed(
        "GPU memory",
        f"at least {MEMORY_SHARE:.0%} of the profile's",
        "a card sold as 80 GB shows a little less than 80 GiB",
    ),
    _fixed(
        "matrix product, copies and all-reduce",
        f"at most {MOST_OF_PEAK:g} times the profile's `hardware.peaks`",
        "the specification of the device or the link allows no more: it was not measured",
    ),
    _fixed(
        "sizes on a GPU",
        f"matrices of at least {LEAST_MATRIX}, copies and all-reduce of {LEAST_COPY_MIB} MiB",
        "smaller ones do not fill a GPU, or stay in its cache",
    ),
    _fixed(
        "matrix product and memory copy of the slowest GPU",
        f"at least {CARDS_ALIKE:.0%} of the fastest",
        "choice: cards of one kind differ by some percent, a capped or throttled one by more",
    ),
    _fixed(
        "clocks of the nodes",
        f"at most {CLOCKS_APART_S:g} s apart; a warning from {CLOCKS_EXACT_S:g} s",
        "choice: NTP keeps milliseconds, and a straggler of 20 ms is told",
    ),
    _fixed(
        "power limit of a GPU, before the run and around each launch",
        f"at least {POWER_LEAST:.0%} of the card's own",
        "a card that is held down is not the one that was bought",
    ),
    _fixed("prefill warning", f"sequential and S >= {LONG_SEQUENCE}", "requirement E1"),
)
PLAUSIBLE = (
    _fixed(
        "MFU",
        f"at least {IDLE_MFU:.0%} of the peak, at most all of it",
        "below it the devices idle, more than the peak is not possible",
    ),
    _fixed(
        "first loss",
        f"within {START_TOLERANCE:.0%} of ln(vocabulary)",
        "a fresh model predicts about uniformly",
    ),
    _fixed(
        "mean loss of the last 50 steps",
        f"not under the floor by more than {FLOOR_SLACK:g} nats or 4 standard errors",
        "below it the model sees the future",
    ),
    _fixed(
        "loss of every step",
        f"from 0 to {LOSS_MOST:g} x ln(vocabulary)",
        "a cross-entropy is not negative, and no model is that wrong",
    ),
    _fixed(
        "other work during a timed launch",
        f"at most {OTHER_WORK_SHARE:.0%} of all CPUs, else a warning",
        "choice: from about here on it shows in the times; it never decides",
    ),
    _fixed("steps", "1, 2, 3 and so on, none missing", "a row can be neither lost nor added"),
    _fixed(
        "files of two launches",
        "never the same",
        "two launches are never timed alike to the last digit",
    ),
    _fixed("tokens", "steps x S x global batch x accumulation, exactly", "counted, not estimated"),
    _fixed(
        "toks_per_s",
        f"tokens / dt_s within {RATE_TOLERANCE:.0%}",
        "the columns are written from one measurement",
    ),
    _fixed("sum of dt_s", "at most the launch's duration", "steps happen inside the launch"),
    _fixed("throughput", "lower bound over at least 3 launches", "one-sided 5 %"),
    _fixed(
        "loss against accepted runs",
        "shown only if the upper bound of the ratio is beyond the limit",
        "one-sided 1 %",
    ),
    _fixed(
        "PCIe replays of a launch",
        f"at most {PCIE_REPLAYS_PER_MINUTE} a minute: a warning; more: INVALID",
        "NVIDIA DCGM's largest recommended rate",
    ),
    _fixed(
        "corrected ECC errors of a launch",
        "any: a warning",
        "the values stay right; the driver's alarm for too many is Xid 92",
    ),
    _fixed(
        "uncorrected ECC errors, remapped rows, Xids, another process on a GPU",
        "none",
        "the machine was not healthy, or not this launch's alone",
    ),
    _fixed(
        "uncorrected ECC errors since boot, a pending or failed remap or retirement, and a link "
        "narrower than the profile's, when a launch begins",
        "none",
        "preflight found none, so the machine fell sick while no launch used that GPU",
    ),
    _fixed(
        "SM clock, median of the samples in which the GPU works",
        f"at least {CLOCK_LEAST:.0%} of the highest; working: above {WORKING_PERCENT:g} %",
        "choice: clocks that were set or held down; a GPU that idles has low ones by right",
    ),
    _fixed(
        "counters of the GPUs and kernel log of a launch",
        f"taken at most {TAKEN_LATE_S:g} s after it began, and after it ended",
        "what was taken at another time says nothing of this launch",
    ),
    _fixed(
        "thermal or power slowdown",
        f"in at most {THROTTLED_SHARE:.0%} of the samples: a warning; in more: INVALID",
        "it changes the mean pace",
    ),
)
SWEEP = (
    _fixed(
        "control arm",
        f"99 % interval of one more baseline launch, at least {CONTROL_LEAST:.0%} wide",
        "otherwise the arms were compared under other conditions",
    ),
    _fixed(
        "best bucket",
        "beats every other arm, paired; else TIE: the configured one stays",
        "1 % for all arms together",
    ),
)
PAIRED = (
    _fixed(
        "first loss of one rank",
        f"within {FIRST_LOSS_TOLERANCE:.1%} of that of all ranks, which read the same rows",
        "only rounding differs",
    ),
    _fixed("scaling", "at most 1.05", "more is not possible for like runs"),
    _fixed("scaling", "bound of E = T_N / (N x T_1)", "one-sided 1 %"),
    _fixed(
        "scaling over nodes",
        "the same of 2, 4, ... and all nodes; each has to pass",
        "one-sided 1 %; that one of k fails: 1 % / k",
    ),
)
NON_INFERIOR = (
    _fixed("fused AdamW", "ratio above 1 - margin: KEEP; below: DROP", "one-sided 5 %"),
)
STABLE = (
    _fixed("steady", "slope inside the drift limit, no change point, no stall", "90 % interval"),
    _fixed("memory", "no new high-water mark (max(64 MiB, 0.2 %)), projection", "one-sided 5 %"),
)
