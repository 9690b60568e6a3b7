"""New clients of a finished run of PerFedRLNAS (Yao and Li, AAAI 2024, Fig. 5): the supernet is frozen, only their policies learn.

In a round every newcomer gets a subnet drawn from its policy, which begins uniform, tries it as it is on its own validation data and
reports how accurate it was, nothing else. Rewards are those of the method; time and memory play no part, because nothing is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from fedloom.assemble import Reopened
from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import Report
from fedloom.core.result import mean_and_std
from fedloom.core.seeds import derive_seed
from fedloom.data.splits import Federation, make_split


@dataclass(frozen=True)
class Newcomer:
    """What one of them ends with: its most likely architecture, untrained by it."""

    name: str
    architecture: str
    test_accuracy: float


@dataclass(frozen=True)
class Joined:
    """accuracies: round by round, mean over newcomers of the test accuracy of the subnets they tried; spreads: over newcomers."""

    accuracies: tuple[float, ...]
    spreads: tuple[float, ...]
    newcomers: tuple[Newcomer, ...]

    def to_table(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def check_method(run: Reopened) -> None:
    if run.settings.method != "perfedrlnas":
        what = f"{run.store.folder} is a run of {run.settings.method}, which has no policies"
        raise InvalidConfig(f"{what}. Give a run with method=perfedrlnas")


def check_run(run: Reopened) -> None:
    check_method(run)
    folder = run.store.folder
    if not run.finished:
        raise InvalidConfig(f"{folder} is not finished. Finish it with `fedloom resume {folder}`")


def join(run: Reopened, clients: int, rounds: int, seed: int, progress: Callable[[int, float, float], None]) -> Joined:
    """Newcomers with data drawn by the run's own rule, from the same pools, with another seed. progress: round, mean accuracy, spread."""
    settings, bench, dataset = run.settings, run.bench, run.federation.dataset
    method: Any = run.method
    place = derive_seed(settings.seed, "newcomers", seed)
    split = make_split(settings.split, dataset.train.labels, dataset.test.labels, clients, place)
    federation = Federation(dataset, split, bench.device)
    names = {name.replace("client", "newcomer"): name for name in federation.names}
    state = replace(run.state(), round=0, seed=place, policies={}, visits={}, accuracies={}, memories={})
    weights = bench.tensors(dict(state.weights))

    def tried(architecture: Any, name: str) -> tuple[float, float]:
        """Accuracy that is reported, and on test data."""
        data = federation.data_of(names[name])
        plain = bench.supernet.plain(weights, architecture)
        statistics = bench.scorer.calibrate(plain, architecture, data.train)
        parts = (bench.selecting(data), data.test)
        reported, tested = (bench.scorer.score_network(plain, architecture, statistics, part).accuracy for part in parts)
        return reported, tested

    course = []
    for number in range(rounds):
        found = {name: tried(method.drawn(state, name), name) for name in names}
        reports = [Report(name, number, facts=_facts(reported)) for name, (reported, _) in found.items()]
        state = replace(method.learned(state, reports), round=number + 1)
        course.append(_spread({name: tested for name, (_, tested) in found.items()}))
        progress(number + 1, *course[-1])
    ends = {name: method.chosen(state, name) for name in names}
    newcomers = tuple(Newcomer(name, architecture.id, tried(architecture, name)[1]) for name, architecture in ends.items())
    means, spreads = zip(*course, strict=True)
    return Joined(means, spreads, newcomers)


def _facts(accuracy: float) -> dict[str, float]:
    return {"accuracy": accuracy, "seconds": 0.0}


def _spread(accuracies: Mapping[str, float]) -> tuple[float, float]:
    mean, std = mean_and_std(list(accuracies.values()))
    assert mean is not None and std is not None
    return mean, std
