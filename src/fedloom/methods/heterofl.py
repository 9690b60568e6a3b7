"""HeteroFL (Diao, Ding and Tarokh, *HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients*,
ICLR 2021, Algorithm 1).

Clients of a tier train the first channels of every layer of one network, weak tiers fewer of them. Every entry becomes the mean over
the participants that hold it; an entry that nobody holds stays.

Deviations and decisions: a width is the smallest that the space offers and that is at least the tier's share of the network's width.
Normalisation has no running statistics in training, as in the paper; at the end every client measures its own on its training images. The
paper scales what a narrow layer gives by its share; normalisation follows each such layer and takes the factor away again, so it is left
out. The loss is over all classes: the paper's may leave out classes that a client lacks. Every client fine-tunes its width at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fedloom.core.architecture import Architecture
from fedloom.core.boundary import Manifest
from fedloom.core.client_site import ClientSite
from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import Arrays, Fact, Report, frozen
from fedloom.core.method import per_client
from fedloom.core.seeds import rng
from fedloom.core.settings import setting
from fedloom.maths.averaging import AVERAGING
from fedloom.methods import tiers
from fedloom.methods.base import METHODS
from fedloom.methods.subnets import SubnetMethod, SubnetState
from fedloom.training.local import Trained


@dataclass(frozen=True)
class HeteroFLSettings:
    architecture: str = setting("largest", "the whole network: smallest, medium, largest, random, or an architecture's name or id")
    widths: tuple[float, ...] = setting(
        (1.0, 0.5, 0.25, 0.125, 0.0625),
        "share of the channels of each tier; without tiers of hardware.* each client draws one",
        low=1e-3,
        high=1,
    )
    averaging: str = setting("coverage_equal", "how updates are combined", choices=AVERAGING)


@dataclass(frozen=True)
class HeteroFLState(SubnetState):
    tiers: Arrays = per_client()  # () of those who took part, where hardware has tiers


@METHODS.add("heterofl", HeteroFLSettings, "HeteroFL: weak devices train the first channels of every layer of one shared network")
@dataclass(frozen=True)
class HeteroFL(SubnetMethod[HeteroFLState]):
    settings: HeteroFLSettings

    spaces: ClassVar[tuple[str, ...]] = ("mobilenetv3", "networks", "nasvit")  # those with genes of widths
    state: ClassVar[type[Any]] = HeteroFLState

    @property
    def uploads(self) -> Manifest:
        return {**super().uploads, **tiers.uploads(self.tools)}

    @staticmethod
    def check_tiers(settings: HeteroFLSettings, count: int) -> None:
        tiers.check("heterofl.widths", len(settings.widths), count)

    # -- server ---------------------------------------------------------------
    def start(self, seed: int) -> HeteroFLState:
        if not self.settings.widths:
            raise InvalidConfig("heterofl.widths is empty. Give the share of each tier, such as [1, 0.5, 0.25]", key="heterofl.widths")
        budgets = self.tools.fleet.tiers if self.tools.fleet else ()
        for number, share in enumerate(self.settings.widths) if budgets else ():
            budgets[number % len(budgets)].space.find(self.slice(seed, share).id, rng(seed))  # refuses what is over the tier's budget
        return super().start(seed)

    def subnet(self, state: HeteroFLState, client: str, final: bool) -> Architecture:
        """A client whose tier is not known yet trains the narrowest, which every device can."""
        shares = self.settings.widths
        tier = tiers.tier_of(self.tools, state.tiers, state.seed, client, len(shares))
        return self.slice(state.seed, min(shares) if tier is None else shares[tier])

    def slice(self, seed: int, share: float) -> Architecture:
        """The whole network with this share of its channels, or the next number that the space offers."""
        space = self.tools.space
        whole = space.find(self.settings.architecture, rng(seed, "architecture"))
        choices = list(whole.choices)
        for number, gene in enumerate(space.genes):
            if gene.channels:
                wanted = share * gene.values[choices[number]]
                choices[number] = next(choice for choice, value in enumerate(gene.values) if value >= wanted)
        return space.canonical(choices)

    def learned(self, state: HeteroFLState, reports: Sequence[Report]) -> HeteroFLState:
        return replace(state, tiers=frozen(tiers.reported(state.tiers, reports)))

    # -- client ---------------------------------------------------------------
    def facts(self, site: ClientSite, architecture: Architecture, trained: Trained) -> dict[str, Fact]:
        return {**tiers.facts(self.tools, site)}
