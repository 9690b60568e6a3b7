"""New clients of a finished run: they search in its supernet, which stays as it is.

Under PerFedRLNAS (Yao and Li, AAAI 2024, Fig. 5) only their policies learn, those of all newcomers together. In a round every newcomer
gets a subnet drawn from its policy, which begins uniform, tries it as it is on images of its own that no client trained on, and reports
how accurate it was, nothing else. Rewards are those of the method; time and memory play no part, because nothing is trained. Under the
other methods a newcomer does what a client does that was never drawn: it gets the shared weights and sends nothing at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedloom.assemble import Reopened
from fedloom.core.client_site import ClientData, ClientSite, Examples
from fedloom.core.errors import InvalidConfig, InvalidData
from fedloom.core.messages import Report
from fedloom.core.result import mean_and_std
from fedloom.core.seeds import derive_seed, rng
from fedloom.data.splits import Federation, make_split
from fedloom.engine.newcomers import check_joinable, shared_state, welcome
from fedloom.maths.partition import Positions, stratified_holdout

SELECTING = 0.5  # share of a newcomer's images of the test pool that reward or select; the others report


@dataclass(frozen=True)
class Newcomer:
    """What one of them ends with: under PerFedRLNAS its most likely architecture, untrained by it; elsewhere its personal model."""

    name: str
    architecture: str
    test_accuracy: float


@dataclass(frozen=True)
class Joined:
    """accuracies: round by round, mean over newcomers of the test accuracy of the subnets they tried; spreads: over newcomers. Both are
    empty for methods without such rounds."""

    accuracies: tuple[float, ...]
    spreads: tuple[float, ...]
    newcomers: tuple[Newcomer, ...]


def check_method(run: Reopened) -> None:
    if run.settings.method != "perfedrlnas":
        what = f"{run.store.folder} is a run of {run.settings.method}, which has no policies"
        raise InvalidConfig(f"{what}. Give a run with method=perfedrlnas")


def check_run(run: Reopened) -> None:
    check_joinable(run.method, run.settings.method)
    folder = run.store.folder
    if not run.finished:
        raise InvalidConfig(f"{folder} is not finished. Finish it with `fedloom resume {folder}`")


def with_personal_models(run: Reopened, clients: int, seed: int, progress: Callable[[int, float, float], None]) -> Joined:
    """Newcomers of a method without policies. progress: how many have their model, the mean of their accuracies so far, the spread."""
    arrived = arrivals(run, clients, seed)
    state = replace(shared_state(run.state()), seed=arrived.seed)
    newcomers: list[Newcomer] = []
    for name in arrived.names:
        diary = welcome(run.method, state, ClientSite(name, arrived.data_of(name))).answer.diary
        newcomers.append(Newcomer(name, diary.architecture, diary.test_accuracy or 0.0))
        progress(len(newcomers), *_spread([newcomer.test_accuracy for newcomer in newcomers]))
    return Joined((), (), tuple(newcomers))


@dataclass(frozen=True)
class Arrivals:
    """Newcomers with their data, by the run's own rule and a seed of their own.

    The run's clients may have trained on any image of the training pool, those that another client keeps for selection included. So what
    rewards, selects and reports comes from the test pool: of a newcomer's images there, one half and the other. Its images of the training
    pool train."""

    seed: int
    federation: Federation

    @property
    def names(self) -> list[str]:
        return [name.replace("client", "newcomer") for name in self.federation.names]

    def data_of(self, name: str) -> ClientData:
        own = self.federation.data_of(name.replace("newcomer", "client"))
        tests, selecting = stratified_holdout(own.test.labels.cpu().numpy(), SELECTING, rng(self.seed, "newcomer", name, "selecting"))
        if not len(selecting):
            cure = "Use fewer newcomers (--clients) or more data"
            raise InvalidData(f"{name} has one image of the test pool, and needs one to select and one to report. {cure}", client=name)
        train = Examples(*(torch.cat([getattr(own.train, part), getattr(own.validation, part)]) for part in ("images", "labels")))
        return ClientData(train, _some(own.test, selecting), _some(own.test, tests))


def _some(examples: Examples, places: Positions) -> Examples:
    chosen = torch.from_numpy(places).to(examples.labels.device)
    return Examples(examples.images[chosen], examples.labels[chosen])


def arrivals(run: Reopened, clients: int, seed: int) -> Arrivals:
    settings, dataset = run.settings, run.federation.dataset
    if dataset.members:
        what = "The images of this run belong to its members, so there are none for newcomers"
        raise InvalidConfig(f"{what}. A site joins with `fedloom join newcomers.safetensors --site SITE.toml`", key="data.name")
    place = derive_seed(settings.seed, "newcomers", seed)
    split = make_split(replace(settings.split, test=0.0), dataset.train.labels, dataset.test.labels, clients, place)
    return Arrivals(place, Federation(dataset, split, run.tools.device))


def with_policies(run: Reopened, clients: int, rounds: int, seed: int, progress: Callable[[int, float, float], None]) -> Joined:
    """Newcomers of PerFedRLNAS. progress: round, mean accuracy, spread."""
    tools = run.tools
    method: Any = run.method
    arrived = arrivals(run, clients, seed)
    names = arrived.names
    state = replace(shared_state(run.state()), round=0, seed=arrived.seed)
    weights = tools.tensors(dict(state.weights))

    def tried(architecture: Any, name: str) -> tuple[float, float]:
        """Accuracy that is reported, and on test data."""
        data = arrived.data_of(name)
        plain = tools.supernet.plain(weights, architecture)
        statistics = tools.scorer.calibrate(plain, architecture, data.train)
        parts = (tools.selecting(data), data.test)
        reported, tested = (tools.scorer.score_network(plain, architecture, statistics, part).accuracy for part in parts)
        return reported, tested

    course = []
    for number in range(rounds):
        found = {name: tried(method.drawn(state, name), name) for name in names}
        reports = [Report(name, number, facts={"accuracy": reported, "seconds": 0.0}) for name, (reported, _) in found.items()]
        state = replace(method.learned(state, reports), round=number + 1)
        course.append(_spread([tested for _, tested in found.values()]))
        progress(number + 1, *course[-1])
    ends = {name: method.chosen(state, name) for name in names}
    newcomers = tuple(Newcomer(name, architecture.id, tried(architecture, name)[1]) for name, architecture in ends.items())
    means, spreads = zip(*course, strict=True)
    return Joined(means, spreads, newcomers)


def _spread(accuracies: list[float]) -> tuple[float, float]:
    mean, std = mean_and_std(accuracies)
    assert mean is not None and std is not None
    return mean, std
