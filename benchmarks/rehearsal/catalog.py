"""Every rehearsed machine: two healthy ones, and those with one thing wrong.

`stopped_by` names the rows that have to stop a sick machine. They follow from the fault and from
what the rows ask, not from what a judgement said: a machine that slips through is a defect.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.rehearsal.cards import A100_SXM, H100_SXM, H200
from benchmarks.rehearsal.drivers import DRIVERS, Process
from benchmarks.rehearsal.machine import KERNELS, Ending, Machine
from benchmarks.rehearsal.roofline import PCIE_BYTES_S, Pace

PAIR = Machine(
    name="healthy_a100x2_pcie4",
    profile="a100x2_pcie4",
    story="two healthy A100 80 GB on PCIe 4",
)
SINGLE = Machine(
    name="healthy_h200x1", profile="h200x1", story="one healthy H200", card=H200, gpus=1
)


PHASES = (
    "baseline", "bucket_sweep", "sdpa_audit", "nvtx", "single_gpu", "fused_adamw", "long_run",
)  # fmt: skip


def _sick(base: Machine, name: str, story: str, *rows: str, **changed: object) -> Machine:
    return replace(base, name=name, story=story, stopped_by=rows, **changed)  # type: ignore[arg-type]


_BEFORE = (
    _sick(
        PAIR, "no_cuda_in_torch", "torch was built without CUDA", "preflight.cuda", torch_cuda=None
    ),
    _sick(
        PAIR, "driver_too_old", "driver 535, torch for CUDA 13",
        "preflight.cuda", "preflight.gpu_driver", driver=DRIVERS["535"],
    ),
    _sick(
        PAIR, "one_gpu_missing", "one of the two GPUs is not there",
        "preflight.cuda", "preflight.gpus", gpus=1,
    ),
    _sick(SINGLE, "wrong_card", "an H100 where the profile is for an H200",
          "preflight.gpus", "preflight.gpu_memory", card=H100_SXM),
    _sick(PAIR, "nvlink_unexpected", "SXM cards with NVLink, the profile is for PCIe",
          "preflight.nvlink", card=A100_SXM, link="NV12"),
    _sick(replace(PAIR, profile="a100x2_nvlink", card=A100_SXM), "nvlink_missing",
          "the NVLinks are down, the profile is for NVLink", "preflight.nvlink", link="SYS"),
    _sick(PAIR, "mig_on", "GPU 1 is cut into instances", "preflight.mig", gpu={1: {"mig": True}}),
    _sick(PAIR, "pcie_x8", "GPU 1 has eight lanes", "preflight.pcie", gpu={1: {"pcie_width": 8}}),
    _sick(PAIR, "pcie_gen3_slot", "GPU 0 sits in a slot of generation 3", "preflight.pcie",
          gpu={0: {"pcie_gen_max": 3}}),
    _sick(PAIR, "other_tenant", "somebody else computes on GPU 0", "preflight.gpu_clean",
          gpu={0: {"used_mib": 31_400, "utilization": 98, "reasons": (),
                   "processes": (Process(pid=3111, name="python3", used_mib=31_396),)}}),
    _sick(SINGLE, "memory_not_freed", "9 GiB are taken and no process shows", "preflight.gpu_clean",
          gpu={0: {"used_mib": 9216}}),
    _sick(PAIR, "ecc_before", "two uncorrected memory errors since boot", "preflight.gpu_clean",
          gpu={1: {"dram_uncorrectable": 2}}),
    _sick(SINGLE, "sram_parity_before", "a parity error in the SRAM, driver 570",
          "preflight.gpu_clean", driver=DRIVERS["570"], torch_cuda="12.8",
          gpu={0: {"sram_parity": 1}}),
    _sick(PAIR, "remap_pending", "a row remap waits for a reset", "preflight.gpu_clean",
          gpu={0: {"remapped_uncorrectable": 1, "remap_pending": True}}),
    _sick(PAIR, "remap_failed", "the spare rows are used up", "preflight.gpu_clean",
          gpu={0: {"remapped_uncorrectable": 8, "remap_failure": True}}),
    _sick(PAIR, "throttled_before", "GPU 1 throttles for heat while it rests, driver 550",
          "preflight.gpu_clean", driver=DRIVERS["550"], torch_cuda="12.8",
          gpu={1: {"reasons": ("sw_thermal_slowdown",), "temperature": 88}}),
    _sick(PAIR, "leftover_trainer", "a trainer of an earlier run is alive", "preflight.leftovers",
          leftovers=("python -m nsa.train --config x.yaml",)),
    _sick(PAIR, "disk_full", "3 GiB are free", "preflight.disk_free", disk_free_gib=3.0),
    _sick(PAIR, "disk_slow", "the disk writes 11 MiB/s", "preflight.disk_speed", disk_mib_s=11.0),
    _sick(SINGLE, "wrong_products", "the model's test fails on this card", "preflight.whole_model",
          failing_tests=("test_whole_model",)),
)  # fmt: skip
_SLOW = (
    _sick(PAIR, "half_clock", "both GPUs run at half their clock under load",
          "preflight.matmul", paces=(Pace(clock=0.5), Pace(clock=0.5))),
    _sick(SINGLE, "power_cap", "a power cap of 300 W, so 62 % of the clock under load",
          "preflight.gpu_power", "preflight.matmul", paces=(Pace(clock=0.62),),
          gpu={0: {"power_limit_w": 300.0}}),
    _sick(PAIR, "one_slow_gpu", "GPU 1 runs at 60 % of its clock under load",
          "preflight.matmul", paces=(Pace(), Pace(clock=0.6))),
    _sick(PAIR, "one_capped_gpu", "a power cap of 220 W on GPU 0 only: 75 % of its clock",
          "preflight.gpu_power", "preflight.matmul", paces=(Pace(clock=0.75), Pace()),
          gpu={0: {"power_limit_w": 220.0}}),
    _sick(SINGLE, "mild_cap", "a power cap of 600 W, which costs 4 % of the clock",
          "preflight.gpu_power", paces=(Pace(clock=0.96),), gpu={0: {"power_limit_w": 600.0}}),
    _sick(PAIR, "capped_later", "somebody caps GPU 0 at 200 W after the baseline",
          "bucket_sweep.devices", "long_run.devices",
          after_launch={"baseline/run5": {0: {"power_limit_w": 200.0}}}),
    _sick(SINGLE, "held_clocks", "somebody holds the clock at 1,095 MHz once it trains",
          "baseline.devices", "long_run.devices", held_mhz={0: 1095}),
    _sick(SINGLE, "slow_memory", "the memory has 55 % of its bandwidth",
          "preflight.memory_copy", paces=(Pace(memory=0.55),)),
    _sick(PAIR, "slow_link", "the GPUs reach 3 GB/s together", "preflight.all_reduce",
          link_bytes_s=3.0e9),
    _sick(PAIR, "link_retrained", "the link stays at generation 1 under load",
          "preflight.host_copy", "preflight.all_reduce", loaded_generation=1,
          link_bytes_s=PCIE_BYTES_S[3] / 4),
    _sick(PAIR, "link_busy", "other traffic leaves 3 GB/s of the link while it trains",
          "single_gpu.scaling", busy_link_bytes_s=3.0e9),
    _sick(PAIR, "hot_gpu", "GPU 1 throttles for heat once it trains, to 55 % of its clock",
          "baseline.devices", "single_gpu.scaling", hot={1: Pace(clock=0.55)}),
    _sick(PAIR, "straggler", "the host launches rank 1's operators 45 % slower",
          "single_gpu.scaling", paces=(Pace(), Pace(host=1.45))),
    _sick(SINGLE, "host_bound", "the processor launches operators at 40 % of the pace",
          "baseline.gpu_utilisation", paces=(Pace(host=2.5),)),
    _sick(PAIR, "data_starved", "every step waits 40 ms for data",
          "baseline.gpu_utilisation", fetch_s=0.042),
    _sick(PAIR, "data_stalls", "every 30th step waits 0.4 s for data",
          "long_run.steady", stall_every=30, stall_s=0.4),
    _sick(PAIR, "thermal_soak", "the clocks sink by 12 % during the long run",
          "long_run.steady", slower_at_end=0.12),
    _sick(SINGLE, "no_samples", "NVML takes no samples", "baseline.gpu_utilisation",
          sampled=False),
    _sick(SINGLE, "math_attention", "attention falls back to math", "sdpa_audit.kernels",
          kernels={**KERNELS, "sel": "math"}),
    _sick(PAIR, "unknown_kernel", "the window runs on a kernel that the profile does not know",
          "sdpa_audit.kernels", kernels={**KERNELS, "win": "overrideable"}),
    _sick(SINGLE, "v2_slower", "the vectorized ranges are slower here", "v2_parity.faster",
          v2_speedup=0.9, failing_tests=("test_performance_guards",)),
)  # fmt: skip
_TOLD = (
    _sick(PAIR, "copies_too_fast", "ceilings.json tells copies of twenty times what the memory can",
          "preflight.memory_copy", "preflight.host_copy",
          told_rates={"memory_copy": 20.0, "host_copy": 20.0}),
    _sick(PAIR, "all_reduce_too_fast", "ceilings.json tells fifty times what the link can carry",
          "preflight.all_reduce", told_rates={"all_reduce": 50.0}),
    _sick(SINGLE, "product_too_fast", "ceilings.json tells a product of 1.2 times the peak",
          "preflight.matmul", told_rates={"matmul": 1.65}),
    _sick(SINGLE, "copies_in_the_cache", "copies of 2 MiB, which never leave the cache",
          "preflight.memory_copy", copied_mib={"memory_copy": 2}),
    _sick(PAIR, "counters_of_last_year", "the counters are a year old",
          "baseline.devices", "long_run.devices", counters_taken_at="2025-01-01T06:00:00Z"),
    _sick(SINGLE, "kernel_log_of_tomorrow", "the kernel log is of the day after",
          "baseline.devices", "long_run.devices", kernel_log_of="2026-01-02T06:00:00Z"),
    _sick(PAIR, "other_torch", "the launches ran on another torch than preflight saw",
          "baseline.as_planned", "long_run.as_planned",
          versions={phase: {"torch": "2.9.1"} for phase in PHASES}),
    _sick(PAIR, "other_nccl_later", "NCCL was replaced between the baseline and the long run",
          "long_run.as_planned", versions={"long_run": {"nccl": "2.21.5"}}),
    _sick(SINGLE, "other_driver_in_env", "env.json of the profiled launch tells another driver",
          "nvtx.as_planned", versions={"nvtx": {"driver": "550.144.03"}}),
    _sick(SINGLE, "no_self_test", "the trainer did not test its kernels on this GPU",
          "baseline.oracle", "long_run.oracle", self_test=False),
    _sick(PAIR, "window_fallback", "in one of the compared launches the window ran with masks",
          "baseline.comparable", windows={"baseline/run2": "masked"}),
    _sick(SINGLE, "samples_of_last_week", "the samples of the GPU were taken a week before",
          "baseline.devices", "baseline.gpu_utilisation", samples_days=-7.0),
)  # fmt: skip
_WRONG = (
    _sick(PAIR, "leak_on_rank_1", "rank 1 leaks 1.5 MiB in each step", "long_run.memory_plateau",
          leak_mib_per_step={1: 1.5}),
    _sick(SINGLE, "never_learns", "the loss stays at ln(256)", "long_run.learns", learns=False),
    _sick(PAIR, "gradients_summed", "the ranks get the sum, not the mean", "baseline.gradients",
          gradient="sum"),
    _sick(PAIR, "gradients_own", "each rank keeps its own gradient", "baseline.completed",
          gradient="own"),
    _sick(PAIR, "ranks_diverge", "a flipped bit: the ranks' parameters part",
          "baseline.completed", diverges=True),
    _sick(SINGLE, "wrong_attention", "attention is off by a fifth of itself", "baseline.oracle",
          attention_error=0.2),
)  # fmt: skip
_XID = "NVRM: Xid (PCI:0000:{}:00): {}"
_ENDS = (
    _sick(PAIR, "xid_79", "GPU 1 falls off the bus in the second launch",
          "baseline.completed", "baseline.devices",
          ending=Ending(kind="lost", at="baseline/run2", step=57, rank=1,
                        says="unspecified launch failure"),
          kernel_log={"baseline/run2": (
              _XID.format("51", "79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."),
              "NVRM: GPU 0000:51:00.0: GPU has fallen off the bus.")}),
    _sick(SINGLE, "xid_48", "a double-bit error ends the long run",
          "long_run.completed", "long_run.devices",
          ending=Ending(kind="abort", at="long_run", step=700,
                        says="uncorrectable ECC error encountered"),
          after_launch={"long_run/run": {0: {"dram_uncorrectable": 1}}},
          kernel_log={"long_run/run": (
              _XID.format("17", "48, pid=4711, name=python3, An uncorrectable double bit error "
                                "(DBE) has been detected on GPU in the framebuffer."),)}),
    _sick(PAIR, "nccl_timeout", "rank 1 does not come; NCCL's watchdog aborts rank 0",
          "baseline.completed", ending=Ending(kind="timeout", at="baseline", step=33, rank=1)),
    _sick(PAIR, "nccl_timeout_once", "the same, but only in one first attempt",
          "bucket_sweep.completed",
          ending=Ending(kind="timeout", at="bucket_sweep", step=33, rank=1, attempts=1)),
    _sick(SINGLE, "out_of_memory", "the allocator finds no memory in the first step",
          "baseline.completed", ending=Ending(kind="oom", at="baseline", step=1, says="2.40 GiB")),
    _sick(SINGLE, "nan_at_step_412", "the loss is not a number at step 412",
          "long_run.loss_finite", ending=Ending(kind="nan", at="long_run", step=412)),
)  # fmt: skip
_COUNTED = (
    _sick(PAIR, "ecc_during", "an uncorrected memory error while the second launch ran, unnoticed",
          "baseline.devices", after_launch={"baseline/run2": {1: {"dram_uncorrectable": 1}}}),
    _sick(SINGLE, "row_remapped", "Xid 63: a row was remapped during the long run",
          "long_run.devices",
          after_launch={"long_run/run": {0: {"remapped_uncorrectable": 1, "remap_pending": True}}},
          kernel_log={"long_run/run": (
              _XID.format("17", "63, pid='<unknown>', name=<unknown>, Row Remapper: New row "
                                "(0x000000000123abc0) marked for remapping, reset gpu to "
                                "activate."),)}),
    _sick(PAIR, "ecc_while_idle", "an uncorrected memory error of GPU 1 while GPU 0 trained alone",
          "fused_adamw.devices", "long_run.devices",
          after_launch={"single_gpu/share3": {1: {"dram_uncorrectable": 1}}}),
    _sick(PAIR, "width_lost_while_idle", "GPU 1 is down to eight lanes when GPU 0 trained alone",
          "fused_adamw.devices", "long_run.devices",
          after_launch={"single_gpu/share3": {1: {"pcie_width": 8}}}),
    _sick(PAIR, "link_errors", "the link of GPU 0 repeats 900 packets in a minute",
          "fused_adamw.devices", after_launch={"fused_adamw/interleaved": {0: {"replays": 900}}}),
    _sick(PAIR, "aer", "an uncorrected error of the link in the kernel log", "single_gpu.devices",
          kernel_log={"single_gpu/run1": (
              "nvidia 0000:17:00.0: AER: PCIe Bus Error: severity=Uncorrected (Non-Fatal), "
              "type=Transaction Layer, (Requester ID)",)}),
)  # fmt: skip
# Not sick: the answer of the comparison is another one, and the machine may go.
OTHER_ANSWERS = (
    replace(
        PAIR,
        name="fused_slower",
        story="fused AdamW takes nine times as long: DROP, and plain AdamW stays",
        paces=(Pace(fused=0.111), Pace(fused=0.111)),
    ),
)
HEALTHY = (PAIR, SINGLE)
SICK = (*_BEFORE, *_SLOW, *_TOLD, *_WRONG, *_ENDS, *_COUNTED)
MACHINES = (*HEALTHY, *OTHER_ANSWERS, *SICK)
