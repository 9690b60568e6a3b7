"""Which runs a page is about, and which runs in the same folder they can be compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.core.errors import DamagedRun, FedloomError
from fedloom.core.reading import parse_json
from fedloom.engine.base import ENGINES
from fedloom.engine.store import read_result
from fedloom.files import ORDER, read_plain
from fedloom.methods.base import METHODS
from fedloom.report.reading import flat_settings, read_method, split_bytes
from fedloom.report.view import BASELINES, Baseline
from fedloom.report.words import plain
from fedloom.spaces.base import SPACES

# Settings in which runs may differ and still be compared without a word.
NO_DIFFERENCE = ("method", "run.folder", "run.checkpoint_every", "engine", "plugins", "data.folder")


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """Runs by their folders; a folder that holds runs, such as compare's, stands for all of them."""
    found: list[Path] = []
    for path in paths:
        inside = [path] if (path / "config.toml").exists() else _runs_in(path)
        if not inside:
            raise DamagedRun(f"{path} is neither a run folder (it has no config.toml) nor a folder of runs", folder=str(path))
        found += [folder for folder in inside if folder.resolve() not in [other.resolve() for other in found]]
    return found


def _runs_in(place: Path) -> list[Path]:
    """The first run is what the others are compared to: as ``fedloom compare`` had it; where that is not known, what others are measured
    by comes last. A sweep has a folder for each value."""
    folders = sorted(path.parent for path in (*place.glob("*/config.toml"), *place.glob("*=*/*/config.toml")))
    order = _order(place) or (_order(place.resolve().parent) if "=" in place.name else [])

    def rank(folder: Path) -> tuple[int, bool]:
        method = read_method(folder)
        return order.index(method) if method in order else len(order), method in BASELINES

    return sorted(folders, key=rank)


def _order(place: Path) -> list[str]:
    """The methods of a comparison, the first being the one compared to; none if that was not written down, or cannot be read."""
    try:
        return [str(method) for method in parse_json(read_plain(place / ORDER))["methods"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def baselines_of(folder: Path, given: Sequence[Path] = ()) -> list[Baseline]:
    """Finished runs of local and fedavg on the same images with the same seed: those given first, then those that lie beside it."""
    beside = sorted(path.parent for path in folder.resolve().parent.glob("*/config.toml"))
    own = folder.resolve()
    places = list(dict.fromkeys(path.resolve() for path in [*given, *beside] if path.resolve() != own))
    mine, split = flat_settings(folder), split_bytes(folder)
    fitting: dict[str, list[Path]] = {}
    for place in places:
        theirs = _settings_of_neighbour(place)
        if not theirs or theirs.get("method") not in BASELINES or theirs["method"] == mine["method"]:
            continue
        if theirs.get("seed") == mine.get("seed") and split is not None and split == split_bytes(place):
            fitting.setdefault(theirs["method"], []).append(place)
    return [_baseline(mine, fitting[method]) for method in BASELINES if method in fitting]


def _settings_of_neighbour(place: Path) -> dict[str, Any] | None:
    """Nothing for a neighbour that is no finished run: it is not what was asked about."""
    try:
        result = read_result(place)
        return flat_settings(place) if result.get("finished") and result["clients"] else None
    except FedloomError:
        return None


def _baseline(mine: Mapping[str, Any], places: Sequence[Path]) -> Baseline:
    place = places[0]
    result, theirs = read_result(place), flat_settings(place)
    others = {*METHODS, *SPACES, *ENGINES} - {mine["space"]}
    differs = tuple(
        f"{key} ({plain(value, 40)} there, {plain(mine.get(key), 40)} here)"
        for key, value in theirs.items()
        if value != mine.get(key) and key not in NO_DIFFERENCE and key.partition(".")[0] not in others
    )
    shown = str(place.relative_to(Path.cwd())) if place.is_relative_to(Path.cwd()) else str(place)
    accuracies = {row["name"]: row["test_accuracy"] for row in result["clients"]}
    cost = result["cost"]
    return Baseline(theirs["method"], shown, accuracies, float(cost["seconds"]), int(cost["bytes_up"]), differs, len(places) - 1)
