"""A disk of its own that can be filled and freed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class SmallDisk:
    folder: Path

    @property
    def _filling(self) -> Path:
        return self.folder / ".filling"

    def fill(self) -> None:
        """To the last byte; call it again for what others have removed since."""
        with open(self._filling, "ab", buffering=0) as file:
            try:
                while file.write(bytes(1 << 16)):
                    pass
            except OSError:
                pass

    def free(self) -> None:
        self._filling.unlink()


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[SmallDisk | None]:
    """Of so many bytes, in memory, mounted at a new folder; nothing where this user may not mount."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "fedloom-test", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    except OSError:  # there is no such command
        mounted = False
    try:
        yield SmallDisk(folder) if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=20)
