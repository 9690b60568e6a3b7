"""What clients of PerFedSDE-NAS compute about themselves, which must be in no message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fedloom.core.architecture import Architecture
from fedloom.methods.perfedsde import PerFedSDE
from fedloom.training.scoring import Scored, Scorer

PUBLISHED = (  # Algorithm 1, said in full
    *("perfedsde.anchor=", "perfedsde.warmup=0", "perfedsde.distance=1", "perfedsde.sampling=archive", "perfedsde.same_weights=false"),
    *("perfedsde.criterion=accuracy", "perfedsde.renewal=1", "perfedsde.restarts=true", "perfedsde.finalists=0", "perfedsde.drift=false"),
)
ANCHORED = (  # the other course
    *(
        "perfedsde.anchor=medium",
        "perfedsde.distance=0.5",
        "perfedsde.sampling=near",
        "perfedsde.same_weights=true",
        "perfedsde.drift=true",
    ),
    *("perfedsde.criterion=loss", "perfedsde.renewal=0.5", "perfedsde.restarts=false", "perfedsde.finalists=1", "training.choice=evidence"),
)


@dataclass
class Secrets:
    """What clients computed about themselves."""

    scored: list[list[Scored]] = field(default_factory=list)  # by call
    tasks: list[torch.Tensor] = field(default_factory=list)
    drawn: list[Architecture] = field(default_factory=list)


@contextmanager
def overheard(method: PerFedSDE) -> Iterator[Secrets]:
    """Listens inside the clients."""
    secrets, score = Secrets(), Scorer.score_subnets

    def listen(self: Scorer, *given: Any) -> list[Scored]:
        secrets.scored.append(score(self, *given))
        return secrets.scored[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scorer, "score_subnets", listen)
        if method.settings.generator == "diffusion":
            kind = type(method._diffusion.generator)
            task, draw = kind.task, kind.draw

            def listen_to_task(self: Any, *given: Any) -> Any:
                found = task(self, *given)
                secrets.tasks += [] if found is None else [found]
                return found

            def listen_to_draw(self: Any, *given: Any, **named: Any) -> Any:
                found = draw(self, *given, **named)
                secrets.drawn += found
                return found

            patch.setattr(kind, "task", listen_to_task)
            patch.setattr(kind, "draw", listen_to_draw)
        yield secrets
