"""The part of the playbook (`phases.playbook`) that is about the machine and the checkout."""

from __future__ import annotations

from phases.common.situation import Remedy, anywhere, gpu

MACHINE: dict[str, Remedy] = {
    "branch": "git fetch && git checkout the profile's branch && git pull, with a clean tree",
    "two_folders": (
        "unset PYTHONPATH, or let it name the checkout that `runbook` itself runs from (the row "
        "has both folders); to test the other one, run the `runbook` of that checkout"
    ),
    "hardware": anywhere(
        "choose the profile of this machine (`runbook profiles`), or run on the right one",
        command="runbook profiles",
    ),
    "cuda": (
        anywhere("`nvidia-smi -L` lists the GPUs of this machine", command="nvidia-smi -L"),
        "if it lists GPUs: install a torch that was built for CUDA and a driver that can run it, "
        "and leave the GPUs visible (CUDA_VISIBLE_DEVICES)",
        "if it lists none, or is not found: go to a machine that has GPUs, or take --profile cpu, "
        "which tests the code alone",
    ),
    "driver": gpu(
        "update the driver to the version that the row names, or install a torch that was built "
        "for an older CUDA (pytorch.org, previous versions)"
    ),
    "mig": gpu(
        "pin whole GPUs with CUDA_VISIBLE_DEVICES, or switch MIG off on an idle GPU with "
        "`sudo nvidia-smi -i INDEX -mig 0`"
    ),
    "extra_gpus": gpu(
        "pin the GPUs of the profile, such as CUDA_VISIBLE_DEVICES=0,1, so that no other one counts"
    ),
    "gpu_state": gpu(
        "end the processes that `nvidia-smi` lists, if they are yours, and pin the free devices "
        "with CUDA_VISIBLE_DEVICES",
        command="nvidia-smi",
    ),
    "leftovers": (
        "the row names each process: end by its pid what is yours, ask whose the others are "
        "(`ps -o user,lstart,args -p PID`), and run the phase again"
    ),
    "card": gpu(
        "train on another card: this one is slower than its kind, whatever the settings are. Look "
        "at clocks, power limit, temperature and throttle reasons (nvidia-smi -q -d "
        "CLOCK,POWER,TEMPERATURE,PERFORMANCE) and at its ECC counters. Reset or replace it",
        command="nvidia-smi -q -d CLOCK,POWER,TEMPERATURE,PERFORMANCE,ECC",
    ),
    "power": gpu(
        "give the card its own power limit and clocks back (as root: `nvidia-smi -i INDEX -pl "
        "WATTS` with the default that the row names, `-rgc` and `-rac`), or ask who set them and "
        "why; then run the phase again"
    ),
    "ceilings": (
        "do not use these numbers: the profile is not the one of this card or link (runbook "
        "profiles), or ceilings.json was not written by nsa.ceilings on it. Compare with "
        "hardware.peaks of the profile, and run preflight again"
    ),
    "link": gpu(
        "look at the link, not at the settings: generation and width under load (nvidia-smi -q -d "
        "PCIE), nvidia-smi topo -m and nvlink -s, the slot, ACS and IOMMU. NCCL_DEBUG=INFO shows "
        "the path between the ranks",
        command="nvidia-smi topo -m",
    ),
    "overlap": gpu(
        "the link would allow more: sweep NSA_DDP_BUCKET_MB, set NSA_DDP_COMPRESS=bf16 and "
        "NSA_DDP_STATIC_GRAPH=1, leave NCCL_ALGO and NCCL_PROTO unset for a run, and look in an "
        "nvtx run for work of the host between the steps"
    ),
    "devices": gpu(
        "do not use these numbers. Do what the Xid or the counter asks for (reset the GPU, reboot, "
        "cool or reseat it, field diagnostics), end the other process, then run the phase again; "
        "to read the kernel log run as root or set kernel.dmesg_restrict=0"
    ),
    "devices_told": (
        "the numbers stand. Watch what the row names (a counter that grows from run to run is a "
        "card to be looked at). To read the kernel log run as root or set kernel.dmesg_restrict=0"
    ),
    "host_settings": (
        "do what the row says beside each setting. None of them decides, but numbers of machines "
        "that are set up differently are not alike"
    ),
    "disk": anywhere(
        "free space there (`df -h` shows it), or write elsewhere with --out", command="df -h"
    ),
    "variables": anywhere(
        "correct or unset the variables named: `runbook toggles` lists the known ones",
        command="runbook toggles",
    ),
}
