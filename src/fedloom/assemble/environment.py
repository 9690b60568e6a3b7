"""Where a run takes place: the device, versions and the commit, as its result records them."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedloom
from fedloom.core.errors import InvalidConfig
from fedloom.core.machine import DEVICES

AT_ONCE = "FEDLOOM_RUNS_AT_ONCE"  # told to the runs of a comparison: how many share this machine, and so its GPU
USABLE = 0.95  # of the memory of a GPU that processes share


def usable_device(wanted: str, key: str = "device") -> torch.device:
    """wanted: one of ``DEVICES``."""
    if wanted not in DEVICES:
        raise InvalidConfig(f"{key} must be {', '.join(DEVICES[:-1])} or {DEVICES[-1]}, got {wanted!r}", key=key)
    if wanted == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig(f"{key} is cuda, but torch finds no GPU. Use {key}=cpu", key=key)
    if wanted == "mps" and not torch.backends.mps.is_available():
        raise InvalidConfig(f"{key} is mps, but torch finds no GPU of a Mac (macOS on Apple silicon). Use {key}=cpu", key=key)
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def share_gpu(device: torch.device, workers: int = 0) -> None:
    """Keep this process to its part of a GPU's memory, which decides how much it does at once. workers: of its run, if it is one."""
    runs = int(os.environ.get(AT_ONCE, "1"))
    if device.type == "cuda" and (workers or runs > 1):
        torch.cuda.set_per_process_memory_fraction(USABLE / (max(1, workers) * runs))


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, commit and device."""
    return {
        "fedloom": fedloom.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "commit": _commit(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
    }


def plugin_digests(plugins: Sequence[str]) -> dict[str, str]:
    """Name of file -> digest of what the user's own components are in; modules have versions of their own."""
    found = {}
    for name in plugins:
        with suppress(OSError):  # a file that is gone
            if name.endswith(".py"):
                found[Path(name).name] = hashlib.blake2b(Path(name).read_bytes(), digest_size=8).hexdigest()
    return found


def stale(results: Mapping[str, Mapping[int, Mapping[str, Any]]], plugins: Sequence[str] = ()) -> list[str]:
    """The runs that were made by another version than this one, or with a plugin file that has changed since, in words."""
    now = environment(torch.device("cpu"))
    versions = [
        f"{method}-{seed} was made by {name} {result['environment'].get(name)}, this is {now[name]}"
        for method, runs in results.items()
        for seed, result in runs.items()
        for name in ("commit", "fedloom", "torch")
        if result["environment"].get(name) != now[name]
    ]
    files = plugin_digests(plugins)
    changed = [
        f"{method}-{seed} was made before {' or '.join(files)} changed. Remove its folder to make it again"
        for method, runs in results.items()
        for seed, result in runs.items()
        if result["environment"].get("plugins", files) != files
    ]
    return versions + changed


@cache
def _commit() -> str:
    """The commit this code was checked out from, marked when the code has changed since; unknown for an installed package."""
    code = Path(fedloom.__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(code), *arguments], capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != code.parents[1]:
            return "unknown"  # some other repository that this package lies in
        changed = git("status", "--porcelain", "--untracked-files=no", "--", str(code))
        return git("rev-parse", "--short=12", "HEAD") + ("+changed" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
