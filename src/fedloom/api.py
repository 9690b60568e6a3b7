"""Fedloom from Python: run a federation, compare methods, and have what they left as tables. ``fedloom.run`` and the others lead here.

Tables are pandas data frames where pandas is installed, and else lists of rows, each a dictionary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from fedloom import comparing, config
from fedloom.assemble import free_folder, new_run
from fedloom.assemble.environment import stale
from fedloom.comparing import Failure, OwnSetting, PlannedRun, RunsView, Sweep
from fedloom.core.errors import DamagedRun, FedloomError, InvalidConfig
from fedloom.core.result import LedgerEntry
from fedloom.engine.run import Watcher
from fedloom.engine.store import Store, how_to_go_on, read_result
from fedloom.files import write_file
from fedloom.models.personal import load_model
from fedloom.report.comparison import blocks_of, comparison_card, sweep_card
from fedloom.report.comparison_files import check_table, table_file
from fedloom.report.published import published_beside
from fedloom.report.track import Several, trackers

Table = Any  # a pandas data frame, or list[dict[str, Any]]


# -- one run ---------------------------------------------------------------------------
@dataclass(frozen=True)
class Result:
    """What a run left in its folder: ``Result("runs/quickstart")``. Accuracies are shares, 0 to 1."""

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))

    @cached_property
    def facts(self) -> dict[str, Any]:
        """All of result.json: method, space, dataset, seed, rounds, accuracy, cost, uploads, environment."""
        found = read_result(self.folder)
        if not found:
            raise DamagedRun(f"{self.folder} has no result yet. `{how_to_go_on(self.folder)}` goes on with it", folder=str(self.folder))
        return found

    @property
    def accuracy(self) -> dict[str, float | None]:
        """``mean`` and ``std`` over clients of the personal models' test accuracy, and what papers report besides."""
        return dict(self.facts["accuracy"])

    @property
    def clients(self) -> Table:
        """A row for each client: name, test and validation accuracy, architecture, parameters, macs, images."""
        return table(self.facts["clients"])

    @property
    def ledger(self) -> Table:
        """A row for each participation: client, round, bytes, seconds by stage, accuracies, and what the method noted."""
        return table([_flat(entry) for entry in Store(self.folder).read_ledger()])

    def model(self, client: str) -> tuple[nn.Module, dict[str, Any]]:
        """A client's own network, ready for evaluation, and its description."""
        return load_model(Store(self.folder).model_path(client))


def run(preset: str = "quickstart", /, *, folder: str | Path | None = None, watcher: Watcher | None = None, **settings: Any) -> Result:
    """Run a federation on this machine and wait for its result.

    preset: a preset's name or a TOML file. settings: as in a settings file, tables as dictionaries: ``rounds=3,
    split={"alpha": 0.3}``. folder: of the run; default: runs/PRESET, with a number added if that exists. watcher: is told what happens.
    """
    chosen = config.load(preset, overrides(settings))
    place = Path(folder or chosen.run.folder or free_folder(Path(preset).stem))
    new_run(chosen, place, Several([*([watcher] if watcher else []), *trackers(chosen.run, place)]))
    return Result(place)


# -- several -----------------------------------------------------------------------------
@dataclass(frozen=True)
class Comparison:
    """Several methods on the same splits. Differences are to the first of them, paired by client and seed."""

    card: Mapping[str, Any]  # what `fedloom compare --json` prints
    runs: tuple[PlannedRun, ...]
    failures: tuple[Failure, ...] = ()
    own_settings: tuple[OwnSetting, ...] = ()  # in which methods differ besides their own tables
    stale: tuple[str, ...] = ()  # runs that another version made, in words

    @property
    def folder(self) -> Path:
        return comparing.common_folder(self.runs)

    @property
    def results(self) -> list[Result]:
        """Of the runs that have one."""
        failed = {failure.run for failure in self.failures}
        return [Result(run.folder) for run in self.runs if run not in failed]

    @property
    def methods(self) -> Table:
        """A row for each method, and of a sweep for each value: accuracy, difference, interval, p, seconds, bytes."""
        return table([_method_row(value, method) for value, block in blocks_of(self.card) for method in block["methods"]])

    @property
    def clients(self) -> Table:
        """A row for each client of each run."""
        failed = {failure.run for failure in self.failures}
        known = [(run, client) for run in self.runs if run not in failed for client in Result(run.folder).facts["clients"]]
        return table([{"method": run.method, "seed": run.seed, "value": run.value, **client} for run, client in known])

    def write(self, path: str | Path) -> None:
        """The table as .csv, .md or .tex."""
        check_table(Path(path))
        write_file(path, table_file(Path(path), self.card).encode())


def compare(
    preset: str = "quickstart",
    /,
    *,
    methods: Sequence[str],
    seeds: int = 1,
    over: str = "",
    jobs: int = 0,
    minutes: float = math.inf,
    view: RunsView | None = None,
    **settings: Any,
) -> Comparison:
    """Run several methods on the same splits and compare them client by client, as `fedloom compare` does.

    Finished runs are not repeated, stopped ones go on. over: a setting and its values, ``split.alpha=0.1,1``. jobs: runs at a time, 0:
    one per core. minutes: runs that are not finished then are stopped. settings: as for ``run``; ``run={"folder": …}`` says where. Runs
    that failed or were stopped are in ``failures``; if there are no others, that is raised.
    """
    sweep = Sweep.read(over) if over else None
    found = compared(preset, overrides(settings), list(methods), seeds, sweep, view or _Unseen(), jobs, minutes=minutes)
    if len(found.failures) == len(found.runs):
        raise failed(found)
    return found


def compared(
    source: str,
    changes: Sequence[str],
    methods: Sequence[str],
    seeds: int,
    sweep: Sweep | None,
    view: RunsView,
    jobs: int = 0,
    side_by_side: int = 1,
    minutes: float = math.inf,
) -> Comparison:
    """Plan, run, collect. jobs: 0: as many as usual; side_by_side: runs in this process instead, which know no limit of time."""
    runs = comparing.plan(source, changes, methods, seeds, sweep)
    own = _own_settings(source, changes, methods, sweep)
    folder = comparing.common_folder(runs)
    comparing.write_order(runs, folder)
    if side_by_side > 1:
        failures = comparing.execute_side_by_side(runs, side_by_side, view)
    else:
        failures = comparing.execute(runs, jobs or comparing.usual_jobs(config.load(source, changes)), view, minutes)
    values = dict.fromkeys(run.value for run in runs)
    results = {value: comparing.collect([run for run in runs if run.value == value], failures) for value in values}
    card = sweep_card(sweep.key, results) if sweep else comparison_card(results[""])
    every = [result for found in results.values() for by_seed in found.values() for result in by_seed.values()]
    card["published"] = published_beside({one["dataset"] for one in every}, {one["space"] for one in every}, list(methods))
    card["folder"] = str(folder)
    card["own_settings"] = [asdict(one) for one in own]
    card["failed"] = [{"run": failure.run.name, "exit_code": failure.exit_code, "reason": failure.reason} for failure in failures]
    plugins = config.load(source, changes).plugins
    warnings = dict.fromkeys(warning for found in results.values() for warning in stale(found, plugins))
    return Comparison(card, tuple(runs), tuple(failures), tuple(own), tuple(warnings))


def failed(found: Comparison) -> FedloomError:
    """What to raise where runs failed, with the exit code of the first."""
    first = found.failures[0]
    error = FedloomError(f"{len(found.failures)} of {len(found.runs)} runs failed, first {first.run.name}: {first.reason}")
    error.exit_code = first.exit_code
    return error


def _own_settings(source: str, changes: Sequence[str], names: Sequence[str], sweep: Sweep | None) -> list[OwnSetting]:
    if sweep is None:
        return comparing.own_settings(source, changes, names)
    every = (comparing.own_settings(source, [*changes, sweep.change(value)], names) for value in sweep.values)
    return list({str(one): one for found in every for one in found}.values())


class _Unseen:
    """Nobody watches."""

    def begin(self, name: str) -> None: ...
    def news(self, name: str, text: str) -> None: ...
    def end(self, name: str, text: str) -> None: ...


# -- settings and tables -----------------------------------------------------------------
def overrides(settings: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Settings as the command line has them: JSON's values are TOML's.

    >>> overrides({"rounds": 3, "split": {"alpha": 0.3}})
    ['rounds=3', 'split.alpha=0.3']
    """
    found = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found += overrides(value, f"{prefix}{key}.")
            continue
        try:
            text = json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
        except TypeError:
            text = "null"
        if text == "null":
            raise InvalidConfig(
                f"{prefix}{key} must be a number, text, true or false, or a list of these, got {value!r}", key=f"{prefix}{key}"
            )
        found.append(f"{prefix}{key}={text}")
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A data frame if pandas is installed, else the rows."""
    try:
        return import_module("pandas").DataFrame(list(rows))
    except ImportError:
        return [dict(row) for row in rows]


def _flat(entry: LedgerEntry) -> dict[str, Any]:
    """An entry with its tables as columns NAME.PART."""
    row: dict[str, Any] = {}
    for key, value in asdict(entry).items():
        if isinstance(value, Mapping):
            row |= {f"{key}.{part}": number for part, number in value.items()}
        else:
            row[key] = ", ".join(value) if isinstance(value, tuple) else value
    return row


def _method_row(value: str, method: Mapping[str, Any]) -> dict[str, Any]:
    difference = method["difference"] or {}
    told = {key: difference.get(key) for key in ("mean", "low", "high", "p", "p_holm", "pairs")}
    costs = {key: method[key] for key in ("seconds", "bytes_up")}
    return {"method": method["method"], "value": value, **method["accuracy"], **{f"difference_{k}": v for k, v in told.items()}, **costs}
