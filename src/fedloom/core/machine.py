"""What Linux, macOS and Windows say in different ways about the machine and this process."""

from __future__ import annotations

import os
import sys

NO_WINDOWS = (
    "Fedloom runs on Linux and macOS. On Windows use WSL, the Windows Subsystem for Linux (`wsl --install`), and install Fedloom inside it"
)

# Where torch computes. auto: a CUDA GPU or the CPU; mps, a Mac's GPU, is used only where it is asked for.
DEVICES = ("auto", "cpu", "cuda", "mps")


def usable_cores() -> int:
    """Those that this process may use, where the system says so, or else all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def process_memory_mb() -> float:
    """The most that this process has had so far; Linux counts it in kilobytes, macOS in bytes."""
    import resource  # not everywhere, and a sentence says so before anything gets here

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
