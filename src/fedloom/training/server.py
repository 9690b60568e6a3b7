"""How a server's weights move from round to round, for every method whose server averages: the settings behind ``[averaging]``."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedloom.core.messages import Arrays, frozen
from fedloom.core.settings import setting
from fedloom.maths.averaging import moved
from fedloom.maths.server_steps import running_mean, with_momentum

VELOCITY, MEAN = "velocity/", "mean/"  # how names begin of what is carried from round to round


@dataclass(frozen=True)
class AveragingSettings:
    momentum: float = setting(0.0, "momentum of the server, as in FedAvgM; 0: weights move by the mean of the updates", low=0, high=0.99)
    last: int = setting(
        1, "personal models start from the mean of the weights after so many last rounds; rounds go on without it; 1: off", low=1
    )


@dataclass(frozen=True)
class Carried:
    """The server's weights, and what it keeps beside them until the rounds are over: nothing, unless ``[averaging]`` says so."""

    weights: Arrays
    memory: Arrays = field(default_factory=dict)


@dataclass(frozen=True)
class ServerSteps:
    settings: AveragingSettings
    rounds: int

    def after(self, round: int, before: Carried, change: Arrays | None) -> Carried:
        """After this round. change: the mean of the updates; none if nobody reported, or if the weights have moved in another way.

        The last round ends with the mean of the last weights, and with nothing beside it: who comes later gets weights alone.
        """
        weights, velocity, mean = before.weights, _named(before.memory, VELOCITY), _named(before.memory, MEAN)
        if change is not None:
            if self.settings.momentum:
                change, velocity = with_momentum(change, velocity, self.settings.momentum)
            weights = frozen(moved(weights, change))
        last = min(self.settings.last, self.rounds)
        number = round + 1 - (self.rounds - last)  # among the last rounds, from 1
        if last > 1 and number >= 1:
            mean = running_mean(mean, weights, number)
        if round + 1 == self.rounds:
            return Carried(frozen(mean) if last > 1 else weights)
        memory = {**{VELOCITY + name: array for name, array in velocity.items()}, **{MEAN + name: array for name, array in mean.items()}}
        return Carried(weights, frozen(memory))


def _named(memory: Arrays, beginning: str) -> Arrays:
    return {name.removeprefix(beginning): array for name, array in memory.items() if name.startswith(beginning)}
