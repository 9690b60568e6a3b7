"""A diffusion model as a client uses it: loaded once, guided by the client's own training images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from fedloom.core.architecture import Architecture
from fedloom.core.client_site import ClientSite
from fedloom.core.errors import InvalidConfig
from fedloom.core.sharing import once
from fedloom.generator.files import load_generator
from fedloom.generator.generator import AnyGenerator
from fedloom.training.tools import Tools

Draw = Callable[[int, np.random.Generator], Sequence[Architecture]]  # so many architectures of a trained generator


@dataclass(frozen=True)
class Diffusion:
    """guidance: how strongly a client's data guide the generator; 0: not, -1: its own strength. file, features, sampler, steps: see
    ``load_generator``."""

    tools: Tools
    file: str
    features: str
    sampler: str
    steps: int
    guidance: float

    @cached_property
    def generator(self) -> AnyGenerator:
        """That of the whole space, loaded by those who use it, once."""
        space = self.tools.supernet.space
        what = space, self.file, self.features, self.tools.device, self.sampler, self.steps, self.guidance != 0
        found = once(lambda: load_generator(*what), "generator", *what)
        if self.guidance > 0 and not found.guided:
            raise InvalidConfig(
                f"perfedsde.guidance is {self.guidance:g}, but the generator of {space.name} has no predictor, so data cannot guide it. "
                "Set it to 0, or train one with it (fedloom pretrain)",
                key="perfedsde.guidance",
            )
        return found

    @property
    def guided(self) -> bool:
        return self.generator.guided and self.guidance != 0

    def draw_for(self, site: ClientSite) -> Draw:
        """What draws for a client's training images, which it looks at when it is first asked."""
        train, strength = site.data.train, None if self.guidance < 0 else self.guidance
        task = cache(lambda: self.generator.task(train.images, train.labels) if strength != 0 else None)
        return lambda count, rng: self.generator.draw(count, rng, task=task(), strength=strength)
