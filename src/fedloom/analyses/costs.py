"""What a run costs a client and round: seconds by stage and bytes (PerFedSDE-NAS, Table D), and how that compares with FedAvg on the
smallest and the largest network of the space (Table 1, rows 2 and 4).

Seconds and bytes are the ledger's, over all participations but the final ones. FedAvg(S) and FedAvg(L) are by arithmetic: as many epochs
over the same images, weights of four bytes sent both ways.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedloom.assemble import Reopened
from fedloom.core.errors import InvalidConfig
from fedloom.core.result import mean_and_std

MEASURING = "test"  # the stage that looks at test data for the ledger's accuracy: it is part of no method
SMALL, LARGE, THIS = "FedAvg(S)", "FedAvg(L)", "this run"


@dataclass(frozen=True)
class Spread:
    """Over participations: one client in one round each."""

    mean: float
    std: float


@dataclass(frozen=True)
class Costs:
    method: str
    participations: int
    seconds: Mapping[str, Spread]  # by stage
    seconds_sum: Spread  # of the stages but the one that only measures
    bytes_down: Spread
    bytes_up: Spread
    bytes_both: Spread
    trained_macs: Spread
    evaluated_architectures: Spread
    relative_macs: Mapping[str, float]  # trained multiply-accumulates, FedAvg(S) is 1
    relative_bytes: Mapping[str, float]


def costs(run: Reopened) -> Costs:
    entries = [entry for entry in run.store.read_ledger() if not entry.final]
    if not entries:
        raise InvalidConfig(f"{run.store.folder} has no rounds to count: its ledger holds no participation but final ones")
    space = run.tools.supernet.space  # the whole one, whatever the budget
    small, large = (space.cost(space.named[name]) for name in ("smallest", "largest"))
    images = sum(_images_seen(run, entry.client) for entry in entries)
    stages = dict.fromkeys(stage for entry in entries for stage in entry.seconds)
    return Costs(
        method=run.settings.method,
        participations=len(entries),
        seconds={stage: _spread([entry.seconds.get(stage, 0.0) for entry in entries]) for stage in stages},
        seconds_sum=_spread([sum(seconds for stage, seconds in entry.seconds.items() if stage != MEASURING) for entry in entries]),
        bytes_down=_spread([entry.bytes_down for entry in entries]),
        bytes_up=_spread([entry.bytes_up for entry in entries]),
        bytes_both=_spread([entry.bytes_down + entry.bytes_up for entry in entries]),
        trained_macs=_spread([entry.trained_macs for entry in entries]),
        evaluated_architectures=_spread([entry.evaluated_architectures for entry in entries]),
        relative_macs={
            SMALL: 1.0,
            LARGE: large.macs / small.macs,
            THIS: sum(entry.trained_macs for entry in entries) / (images * small.macs),
        },
        relative_bytes={
            SMALL: 1.0,
            LARGE: large.parameters / small.parameters,
            THIS: sum(entry.bytes_down + entry.bytes_up for entry in entries) / (len(entries) * 8 * small.parameters),
        },
    )


def _images_seen(run: Reopened, client: str) -> int:
    """By training in one participation: whole batches only, in each of the method's epochs."""
    training = run.settings.training
    examples = len(run.federation.split.part("train", run.federation.names.index(client)))
    return run.method.epochs(training.epochs) * (examples - examples % min(training.batch, examples))


def _spread(values: Sequence[float]) -> Spread:
    mean, std = mean_and_std([float(value) for value in values])
    assert mean is not None and std is not None
    return Spread(mean, std)
