"""Control variates for the anchor of a supernet (SCAFFOLD, Karimireddy et al., ICML 2020, option II), of which nothing leaves a client.

A client's *way* is how far a visit moves the anchor's weights, divided by the sum of the visit's rates. The server carries the mean way c
of all clients, which it works out from the mean of the updates. A client remembers its own, c_i, without what was corrected. Local
steps follow the gradient plus the slope that makes up for c - c_i. Where budgets differ, clients have different anchors: the server has c
for all entries of the supernet, each the mean of those who trained it, and a client receives it for its own anchor.

The published form sends the change of c_i. The server needs no more than its mean, and that is the mean way less c: so the update is
enough. Ways are compared instead of gradients because the server does not know how many steps a client takes. Where clients have equally
many images both are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from fedloom.core.architecture import Architecture
from fedloom.core.messages import Array, Arrays
from fedloom.maths.drift import reach
from fedloom.supernets.base import Weights
from fedloom.training.tools import Tools

CONTROL = "control/"  # how names begin, in a server's and a client's memory


def remembered(memory: Arrays) -> dict[str, Array]:
    """A mean way, of the server or of a client; nothing before the first. In one order, whether it comes from a file or not."""
    return {name.removeprefix(CONTROL): memory[name] for name in sorted(memory) if name.startswith(CONTROL)}


def to_remember(way: Mapping[str, Array]) -> dict[str, Array]:
    return {CONTROL + name: array for name, array in way.items()}


@dataclass(frozen=True)
class Drift:
    """Of one visit, or of one round of the server. rates: one per epoch; restarts: momentum begins anew in every epoch; shared: c;
    own: c_i. Both are empty before the first."""

    tools: Tools
    anchor: Architecture
    rates: Sequence[float]
    restarts: bool
    shared: Arrays
    own: Arrays = field(default_factory=dict)

    def way(self, update: Arrays) -> dict[str, Array]:
        """Of an update of the supernet, on the anchor's entries."""
        return self._per_rate(self.tools.part_of(update, self.anchor))

    def mixed(self, change: Arrays) -> dict[str, Array]:
        """c after a round, like the supernet: the clients that took part have new ways, the others still theirs. change: the mean of the
        updates; it is zero where nobody trained an entry, which then keeps its c."""
        share = np.float32(self.tools.participants / max(self.tools.clients, self.tools.participants))
        ways, shared = self._per_rate(change), self.shared
        if not shared:
            return {name: share * new for name, new in ways.items()}
        return {name: np.where(new == 0, shared[name], shared[name] + share * (new - shared[name])) for name, new in ways.items()}

    def _per_rate(self, arrays: Arrays) -> dict[str, Array]:
        total = np.float32(sum(self.rates))
        return {name: array / total for name, array in arrays.items()}

    def slope(self, steps: int) -> Weights:
        """What every gradient gets besides, like the supernet; zero outside of the anchor, and before there is a mean; never absent, so
        that steps stay the same. steps: of an epoch."""
        every, momentum = [[rate] * steps for rate in self.rates], self.tools.training.momentum
        courses = every if self.restarts else [list(chain(*every))]
        scale = np.float32(sum(self.rates) / sum(reach(course, momentum) for course in courses))  # from a way to a gradient
        empty = {name: np.zeros(shape, np.float32) for name, shape in self.tools.supernet.shapes.items()}
        own = self.own
        part = {name: (own[name] - array if own else -array) * scale for name, array in self.shared.items()}  # ways go against gradients
        return self.tools.own(self.tools.padded(part, self.anchor, empty) if part else empty)

    def own_way(self, update: Arrays) -> dict[str, Array]:
        """c_i after a visit: its way without the correction, which took c - c_i of it."""
        found, shared, own = self.way(update), self.shared, self.own
        return {name: array - shared[name] + (own[name] if own else 0) for name, array in found.items()} if shared else found
