"""A server's weights from round to round, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import Arrays, Report, frozen
from fedloom.methods.fedavg import FedAvg, FedAvgSettings, FedAvgState
from fedloom.training.server import AveragingSettings, Carried, ServerSteps


def of(value: float) -> Arrays:
    return frozen({"w": np.array([value], np.float32)})


def played(changes: Sequence[float | None], **settings: Any) -> list[Carried]:
    """From weight 0 on, as many rounds as there are changes."""
    steps, found = ServerSteps(AveragingSettings(**settings), len(changes)), [Carried(of(0.0))]
    for round, change in enumerate(changes):
        found.append(steps.after(round, found[-1], None if change is None else of(change)))
    return found[1:]


def weights(found: Sequence[Carried]) -> list[float]:
    return [one.weights["w"].item() for one in found]


def test_without_either_the_weights_move_by_the_change_and_nothing_is_carried() -> None:
    found = played([1.0, 2.0, None, -4.0])
    assert weights(found) == [1.0, 3.0, 3.0, -1.0] and not any(one.memory for one in found)


def test_momentum() -> None:
    """v: 1, 2.5, unchanged in a round without reports, 0.25."""
    found = played([1.0, 2.0, None, -1.0, 1.0], momentum=0.5)
    assert weights(found) == [1.0, 3.5, 3.5, 3.75, 4.875]
    assert [one.memory["velocity/w"].item() for one in found[:-1]] == [1.0, 2.5, 2.5, 0.25]
    assert found[-1].memory == {}  # nobody needs it any more


@pytest.mark.parametrize(("last", "end"), [(1, 10.0), (2, 8.0), (3, 19 / 3), (4, 5.0), (9, 5.0)])
def test_the_mean_of_the_last_weights_takes_their_place_at_the_end(last: int, end: float) -> None:
    """Weights 1, 3, 6, 10. More rounds than there are: all of them."""
    found = played([1.0, 2.0, 3.0, 4.0], last=last)
    assert weights(found[:-1]) == [1.0, 3.0, 6.0] and weights(found)[-1] == pytest.approx(end)
    assert ["mean/w" in one.memory for one in found] == [4 - last <= round < 3 and last > 1 for round in range(4)]


def test_a_last_round_without_reports_counts_its_weights_too() -> None:
    assert weights(played([1.0, 2.0, None], last=2))[-1] == 3.0
    assert weights(played([None, None], last=2))[-1] == 0.0


def test_both() -> None:
    """Weights 1, 3.5, 3.75."""
    found = played([1.0, 2.0, -1.0], momentum=0.5, last=2)
    assert weights(found) == [1.0, 3.5, 3.625] and set(found[1].memory) == {"velocity/w", "mean/w"}


@dataclass(frozen=True)
class OwnState:
    """Of somebody's own method, written before there was anything to carry."""

    round: int
    seed: int
    weights: Arrays


@dataclass
class OwnTools:
    server_steps: ServerSteps


@pytest.mark.parametrize("averaging", [AveragingSettings(), AveragingSettings(momentum=0.5), AveragingSettings(last=2)])
def test_a_state_without_a_place_for_it_is_refused_only_if_it_is_needed(averaging: AveragingSettings) -> None:
    own, wanted = OwnState(0, 0, of(1.0)), averaging != AveragingSettings()
    method: Any = FedAvg(FedAvgSettings(), OwnTools(ServerSteps(averaging, 2)))  # type: ignore[arg-type]
    reports = [Report("a", 0, {"update": of(2.0)}, {"examples": 1})]
    known = FedAvgState(0, 0, "", own.weights)
    assert method.absorb(known, reports).weights["w"].item() == 3.0
    if wanted:
        with pytest.raises(InvalidConfig, match=r"OwnState has no field `carried`. Leave them out, or add it"):
            method.absorb(own, reports)
    else:
        assert method.absorb(own, reports) == replace(own, round=1, weights=method.absorb(own, reports).weights)
