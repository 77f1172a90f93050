"""What lies on the disk, of a run and of each launch: its only readers, and the run's writers.

A format is read here and nowhere else, whoever needs it. Readers never raise for what a file
holds; nothing here judges, signals or waits. Each name is spelled here alone; those of the
trainer's own files are in `nsa.contract`.
"""

from __future__ import annotations

import os
from pathlib import Path

RECORD_FILE = "run.json"
EVENTS_FILE = "events.jsonl"
# What a run ends with for now; both list every file with its digest.
ENDS = ("run_finished", "run_interrupted")
MANIFEST_FILE = "MANIFEST.sha256"
ACCEPTED_JSON = "accepted.json"
# What the harness writes into a launch's folder; the trainer's files are in nsa.contract.
LAUNCH_JSON = "launch.json"
RESULT_JSON = "result.json"
CONSOLE_LOG = "console.log"
CONFIG_YAML = "config.yaml"
# Where a run keeps the trainer configs that its launches read; no phase can have this name.
CONFIGS_FOLDER = "trainer-configs"
JUNIT_XML = "junit.xml"
GPU_SAMPLES_CSV = "gpu_samples.csv"
GPU_SAMPLER_TXT = "gpu_sampler.txt"
DEVICES_BEFORE_JSON = "devices_before.json"
DEVICES_AFTER_JSON = "devices_after.json"
NVIDIA_SMI_BEFORE_XML = "nvidia_smi_before.xml"
NVIDIA_SMI_AFTER_XML = "nvidia_smi_after.xml"
CHECKOUT_JSON = "checkout.json"
KERNEL_LOG_JSON = "kernel_log.json"
LOAD_JSON = "load.json"
# What the ranks of a watched launch held besides memory.
RESOURCES_CSV = "resources.csv"
# Of a trainer of one's own: where it writes, when its rows came, and its processes meanwhile.
OWN_FOLDER = "own"
ARRIVALS_CSV = "arrivals.csv"
PROCESSES_CSV = "processes.csv"
INCIDENT_JSON = "incident.json"
ANOMALIES_JSONL = "anomalies.jsonl"
ANOMALY_TYPE = ".anomaly_type"


def run_folders(out: Path) -> list[Path]:
    """The folders of `out` that hold a run or what is left of one, oldest first.

    By name, since an id begins with its UTC time; empty where there is no such folder. A run is its
    owner's: those of other users, in a folder that they share, cannot be looked into.
    """
    left = (RECORD_FILE, EVENTS_FILE, MANIFEST_FILE)
    there = sorted(out.iterdir()) if out.is_dir() else []
    ours = (folder for folder in there if os.access(folder, os.X_OK))
    return [folder for folder in ours if any((folder / name).is_file() for name in left)]
