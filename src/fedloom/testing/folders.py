"""What of two run folders must be equal for the runs to be the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedloom.files import read_arrays


def content(folder: Path) -> dict[str, Any]:
    """File name -> all it says, for every file of a run folder; only clocks and the memory of the process are left out."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return {name: _read(folder / name) for name in names if name != "state/lock"}


def _read(path: Path) -> Any:
    if path.suffix == ".safetensors":
        arrays, facts = read_arrays(path)
        return facts, {name: (array.dtype.str, array.shape, array.tobytes()) for name, array in arrays.items()}
    if path.name == "result.json":
        result = json.loads(path.read_text())
        del result["cost"]["seconds"], result["cost"]["stages"]
        return result
    if path.name == "seconds.json":
        return json.loads(path.read_text())["remark"]
    if path.name == "ledger.jsonl":
        return [_without_clocks(json.loads(line)) for line in path.read_text().splitlines()]
    return path.read_bytes()


def _without_clocks(line: dict[str, Any]) -> dict[str, Any]:
    return {name: sorted(value) if name == "seconds" else value for name, value in line.items() if name != "process_memory_mb"}
