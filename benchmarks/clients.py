"""Does memory grow with the number of simulated clients? Peak resident memory of whole runs with 100 and 10,000 clients.

    python benchmarks/clients.py [--counts 100,10000]

PerFedSDE-NAS on digits, tiny networks, 3 rounds of 5 clients and the final participation of all clients, each run in a process of its own.
Every client keeps a population and a personal model on disk, so the large run needs about 1.5 GB there for a while.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from fedloom.assemble.environment import environment

RESULT = Path(__file__).parent / "results" / "clients.json"
SETTINGS = """
    participants=5 rounds=3 split.rule=plato split.size=12 split.test_size=8 mobilenetv3.width=0.05
    training.batch=8 training.calibration=8 training.finetune_epochs=0
    perfedsde.population=2 perfedsde.offspring=1 perfedsde.iterations=1 inline.device=cpu inline.threads=1
"""
# ru_maxrss of a finished child process, in kilobytes.
MEASURE = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); \
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"


def peak_mb(clients: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fedloom.commands.app", "run", "quickstart", f"clients={clients}", f"run.folder={folder}/run"]
        done = subprocess.run([sys.executable, "-c", MEASURE, *command, *SETTINGS.split()], check=True, capture_output=True, text=True)
    return int(done.stdout) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", default="100,10000")
    arguments = parser.parse_args()
    peaks = {}
    for clients in map(int, arguments.counts.split(",")):
        start = time.perf_counter()
        peaks[clients] = peak_mb(clients)
        print(f"{clients:6} clients: peak {peaks[clients]:.0f} MB, {time.perf_counter() - start:.0f} s", flush=True)
    ratio = max(peaks.values()) / peaks[min(peaks)]
    print(f"ratio {ratio:.3f}")
    record = {"command": "python benchmarks/clients.py", "peak_mb": peaks, "ratio": ratio, "environment": environment(torch.device("cpu"))}
    RESULT.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
