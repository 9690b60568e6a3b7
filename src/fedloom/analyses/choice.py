"""Could a choice of one's own pay? What clients would gain by an architecture each, if they could see which is best.

Every client of a finished run tries the same architectures: the one that all would have without a search, those that clients ended with,
and random ones. Each starts from the shared supernet of the run and is fine-tuned several times, as at the end of a run. Its test images
are cut into two halves. ``maths/choosing.py`` says what follows: whether architectures suit clients differently at all, what the best one
for all gains, what each client's own best gains, and what the lowest loss on validation images finds of it.

Nothing of this can be known in a federation: it takes many more test images than validation images, and all clients' accuracies.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.analyses.resumed import is_share, known_of
from fedloom.assemble import Reopened
from fedloom.core.architecture import Architecture
from fedloom.core.client_site import ClientData, Examples
from fedloom.core.errors import InvalidConfig
from fedloom.core.seeds import derive_seed, rng
from fedloom.files import write_file
from fedloom.maths import choosing
from fedloom.maths.choosing import Numbers
from fedloom.search.draws import new_ones, samples
from fedloom.search.near import Near
from fedloom.supernets.base import Weights
from fedloom.training.finetuning import Finalist, Finetuning
from fedloom.training.scoring import NetworkRequest

SCHEMA, OTHERS, REPEATS = "fedloom.choice/1", 8, 2
Progress = Callable[[int, int, str, Architecture, float], None]  # done, of all, client, architecture, its accuracy


@dataclass(frozen=True)
class Cell:
    """One architecture at one client: after each training the accuracy on both halves of the test images, and the validation loss."""

    accuracies: tuple[tuple[float, float], ...]
    losses: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.accuracies))


Cells = Mapping[tuple[str, int], Cell]  # by client and the architecture's place


@dataclass(frozen=True)
class Choice:
    """What is measured, and with what."""

    run: Reopened
    clients: tuple[str, ...]
    architectures: tuple[Architecture, ...]  # the first: what all have without a search
    found: int  # so many of the others are what clients ended with
    repeats: int
    epochs: int
    rate: float

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "method": self.run.settings.method,
            **self.run.facts,
            "epochs": self.epochs,
            "rate": self.rate,
            "repeats": self.repeats,
            "clients": list(self.clients),
            "architectures": [architecture.id for architecture in self.architectures],
            "found": self.found,
        }

    @cached_property
    def _shared(self) -> Weights:
        weights = self.run.method.supernet_of(self.run.state())
        assert weights  # ``choice_of`` has looked
        return self.run.tools.tensors(weights)

    @cached_property
    def _tuning(self) -> Finetuning:
        """The run's, for so many epochs."""
        usual = self.run.tools.finetuning
        return replace(usual, settings=replace(usual.settings, finetune_epochs=self.epochs))

    def measure(self, file: Path, progress: Progress) -> dict[str, Any]:
        """The whole table; every cell is written to the file as soon as it is known, and one that is there is not measured again."""
        known = known_of(file, self.facts, self._cells)
        places = [(client, place) for client in self.clients for place in range(len(self.architectures))]
        for client, place in places:
            if (client, place) not in known:
                known[client, place] = self._tuned(client, self.architectures[place])
                write_file(file, (json.dumps(self.to_table(known), indent=2) + "\n").encode())
                progress(len(known), len(places), client, self.architectures[place], known[client, place].mean)
        return self.to_table(known)

    def _tuned(self, client: str, architecture: Architecture) -> Cell:
        """The order of images is the client's and the repetition's, the same for all architectures."""
        tools, data, seed = self.run.tools, self.run.federation.data_of(client), self.run.settings.seed
        finalist = Finalist(architecture, tools.supernet.plain(self._shared, architecture))
        seeds = [derive_seed(seed, "choice", client, repeat) for repeat in range(self.repeats)]
        trained = tools.trainer.train_networks([self._tuning.job(finalist, self.rate, data.train, one) for one in seeds])
        parts = (*halves(data, rng(seed, "choice", client, "halves")), data.validation)
        measured = tools.scorer.score_networks([NetworkRequest(one.weights, architecture, data.train, parts) for one in trained])
        first, second, validation = zip(*(one.scores for one in measured), strict=True)
        pairs = zip(first, second, strict=True)
        return Cell(tuple((one.accuracy, other.accuracy) for one, other in pairs), tuple(score.loss for score in validation))

    # -- the table ------------------------------------------------------------------------------------
    def to_table(self, cells: Cells) -> dict[str, Any]:
        """For JSON; findings are there when the table is whole."""
        rows = [[cells.get((client, place)) for place in range(len(self.architectures))] for client in self.clients]
        table = {
            **self.facts,
            "accuracies": [[cell and [list(pair) for pair in cell.accuracies] for cell in row] for row in rows],
            "losses": [[cell and list(cell.losses) for cell in row] for row in rows],
        }
        if len(cells) < len(self.clients) * len(self.architectures):
            return table
        return {**table, **findings(np.array(table["accuracies"], float), np.array(table["losses"], float))}

    def _cells(self, table: Mapping[str, Any]) -> dict[tuple[str, int], Cell]:
        return dict(self._rows(table))

    def _rows(self, table: Mapping[str, Any]) -> Iterator[tuple[tuple[str, int], Cell]]:
        for client, accuracies, losses in zip(self.clients, table["accuracies"], table["losses"], strict=True):
            for place, (shares, own) in enumerate(zip(accuracies, losses, strict=True)):
                if shares is None:
                    continue
                cell = Cell(tuple((first, second) for first, second in shares), tuple(own))
                if not all(map(is_share, (value for pair in cell.accuracies for value in pair))):
                    raise ValueError("an accuracy is no share")
                if not len(shares) == len(own) == self.repeats or not all(type(loss) in (int, float) for loss in own):
                    raise ValueError("a cell has no accuracy and loss for each repetition")
                yield (client, place), cell


def halves(data: ClientData, draw: np.random.Generator) -> tuple[Examples, Examples]:
    """The test images in two parts, drawn by chance; of an odd number one has one more."""
    order = torch.as_tensor(draw.permutation(len(data.test)), device=data.test.labels.device)
    middle = len(order) // 2
    first, second = (Examples(data.test.images[part], data.test.labels[part]) for part in (order[:middle], order[middle:]))
    return first, second


def findings(accuracies: Numbers, losses: Numbers) -> dict[str, Any]:
    """accuracies: (clients, architectures, repeats, 2); losses: (clients, architectures, repeats). Every figure with its interval."""
    clients, count = accuracies.shape[:2]

    def said(figure: Callable[[Any], float]) -> dict[str, Any]:
        """figure: takes rows of clients, all or drawn anew."""
        interval = choosing.between(figure, clients, rng("choice", "bootstrap"))
        return {"points": 100 * figure(slice(None)), "interval": [100 * end for end in interval]}

    found = choosing.spread(accuracies)
    return {
        "another": said(lambda rows: choosing.another(accuracies[rows])),
        "best_for_all": said(lambda rows: choosing.best_for_all(accuracies[rows])),
        "best_for_each": said(lambda rows: choosing.best_for_each(accuracies[rows])),
        "by_validation_loss": said(lambda rows: choosing.lowest_loss(accuracies[rows], losses[rows])),
        "ceiling": said(lambda rows: choosing.ceiling(choosing.spread(accuracies[rows]).own, count)),
        "deviations": {name: 100 * max(value, 0.0) ** 0.5 for name, value in asdict(found).items()},
    }


def choice_of(
    run: Reopened,
    others: int,
    repeats: int,
    clients: int = 0,
    epochs: int | None = None,
    rate: float | None = None,
    first: str = "",
    distance: float | None = None,
) -> Choice:
    """Refuses what has no shared supernet, and what cannot be compared. clients: the first so many, all if 0. first, distance: default:
    the anchor of the run and its distance; without an anchor medium, and anywhere."""
    folder, names, own = run.store.folder, run.federation.names, run.settings.components["perfedsde"]
    if not run.finished:
        raise InvalidConfig(f"{folder} is not finished. Finish it with `fedloom resume {folder}`")
    if not run.method.supernet_of(run.state()):
        raise InvalidConfig(f"{run.settings.method} has no shared supernet at its server, so there is nothing to choose from")
    if run.tools.fleet:
        raise InvalidConfig(f"Clients of {folder} have different budgets, so they cannot all have the same architectures")
    chosen = tuple(names[: clients or None])
    if len(chosen) < 2 or clients > len(names):
        raise InvalidConfig(f"Clients are compared: {folder} has {len(names)}, and 2 or more of them are needed", clients=clients)
    if small := next((name for name in chosen if len(run.federation.data_of(name).test) < 2), None):
        raise InvalidConfig(f"{small} has fewer than two test images, which cannot be halved. Raise split.test", client=small)
    usual, anchor = run.settings.training, own.anchor if run.settings.method == "perfedsde" else ""
    epochs = usual.finetune_epochs if epochs is None else epochs
    if not epochs:
        raise InvalidConfig(f"{folder} does not fine-tune (training.finetune_epochs=0). Give --epochs")
    space = run.tools.space
    start = space.decode(space.encode(run.tools.supernet.space.find(first or anchor or "medium", rng("anchor"))))  # within the budget
    away = (own.distance if anchor else 1.0) if distance is None else distance
    found = _found(run, start, others)
    draw = rng(run.settings.seed, "choice", "random")
    near = Near(space, start, away).moved(samples(space, draw), draw)
    drawn = new_ones(space, near, others - len(found), {start, *found})
    if not (found or drawn):
        raise InvalidConfig(f"There is no architecture beside {start.id[:60]}. Raise --distance", distance=away)
    rates = [one for one in usual.finetune_rates if one]
    rate = (rates[0] if rates else usual.rate) if rate is None else rate
    return Choice(run, chosen, (start, *found, *drawn), len(found), repeats, epochs, rate)


def _found(run: Reopened, start: Architecture, most: int) -> list[Architecture]:
    """What clients ended with, beside the first; drawn among them if they are more."""
    ended = {Architecture.parse(entry.architecture) for entry in run.store.read_ledger() if entry.final} - {start}
    inside: Sequence[Architecture] = sorted((one for one in ended if one.space == run.tools.space.name), key=lambda one: one.choices)
    places = rng(run.settings.seed, "choice", "found").permutation(len(inside))[:most]
    return [inside[place] for place in sorted(places)]
