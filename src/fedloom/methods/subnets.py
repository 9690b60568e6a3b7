"""What methods do alike whose server cuts a part of its supernet for each client: the part that travels, its training, the averaging."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from fedloom.core.architecture import Architecture
from fedloom.core.boundary import LARGEST_COUNT, Manifest, Upload
from fedloom.core.client_site import ClientSite
from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import FINISH, Arrays, Fact, Instruction, Report, frozen
from fedloom.core.method import Answer
from fedloom.core.seeds import derive_seed, rng
from fedloom.core.settings import setting
from fedloom.maths.averaging import AVERAGING
from fedloom.methods.base import FederatedMethod, in_supernet, message, without_sum
from fedloom.supernets.base import Weights
from fedloom.training.local import Trained
from fedloom.training.server import Carried

UPDATE = Upload("what local training changed in the subnet", like="weights")
EXAMPLES = Upload("number of training examples", low=1, high=LARGEST_COUNT)


@dataclass(frozen=True)
class SubnetState:
    """weights: of the supernet."""

    round: int
    seed: int
    weights: Arrays
    carried: Arrays = field(default_factory=dict)  # from round to round, by [averaging]


Sub = TypeVar("Sub", bound=SubnetState)


@dataclass(frozen=True)
class SubnetMethod(FederatedMethod[Sub]):
    """A method says which ``subnet`` a client gets. It may add ``facts`` to reports and learn from them in ``learned``."""

    settings: Any

    state: ClassVar[type[Any]]  # a method's own: a run's file says whose state it holds
    scored: ClassVar[int] = 0  # architectures that ``facts`` scores
    sums_parts: ClassVar[bool] = True

    @property
    def uploads(self) -> Manifest:
        return {"update": UPDATE, "examples": EXAMPLES}

    # -- server ---------------------------------------------------------------
    @abstractmethod
    def subnet(self, state: Sub, client: str, final: bool) -> Architecture:
        """Of a client in this round; final: of its personal network. The same each time it is asked."""

    def learned(self, state: Sub, reports: Sequence[Report]) -> Sub:
        """What the server makes of reports besides their updates; the round and the weights are still the old ones."""
        return state

    def start(self, seed: int) -> Sub:
        state: Sub = self.state(0, seed, frozen(self.tools.initial_supernet(seed)))
        return state

    def instruct(self, state: Sub, client: str, action: str) -> Instruction:
        """A part of the supernet; at the end a network of its own."""
        final = action == FINISH
        architecture = self.subnet(state, client, final)
        weights = (self.tools.network_of if final else self.tools.part_of)(state.weights, architecture)
        return message(state, client, action, {"weights": weights}, {"architecture": architecture.id})

    def absorb(self, state: Sub, reports: Sequence[Report]) -> Sub:
        reports, change = without_sum(reports)
        trained = [report for report in reports if report.arrays]
        change = self.change(state, trained) if trained else change
        moved = self.tools.server_steps.after(state.round, Carried(state.weights, state.carried), change)
        return replace(self.learned(state, reports), round=state.round + 1, weights=moved.weights, carried=moved.memory)

    def change(self, state: Sub, reports: Sequence[Report]) -> Arrays | None:
        """Of every entry the mean over the clients whose subnets hold it; others stay. Nothing where weights do not move."""
        updates = [(self.subnet(state, report.client, False), report.arrays["update"]) for report in reports]
        examples = [float(report.facts["examples"]) for report in reports]
        return self.tools.change(state.weights, updates, examples, AVERAGING[self.settings.averaging].make)

    def supernet_of(self, state: Sub) -> Arrays:
        return state.weights

    # -- client ---------------------------------------------------------------
    def facts(self, site: ClientSite, architecture: Architecture, trained: Trained) -> dict[str, Fact]:
        """What a report says besides the number of examples."""
        return {}

    def answer(self, instruction: Instruction, site: ClientSite) -> Answer:
        architecture = Architecture.parse(str(instruction.facts["architecture"]))
        received = self.tools.tensors(instruction.arrays["weights"])
        return (
            self.finish(instruction, site, architecture, received)
            if instruction.action == FINISH
            else self.train(instruction, site, architecture, received)
        )

    def summand(self, instruction: Instruction, report: Report) -> Report | None:
        return in_supernet(self.tools, instruction, report)

    def finish(self, instruction: Instruction, site: ClientSite, architecture: Architecture, plain: Weights) -> Answer:
        model, diary = self.tools.personalise(site, architecture, plain, instruction.seed)
        return Answer(Report(instruction.client, instruction.round), diary=diary, model=model)

    def train(self, instruction: Instruction, site: ClientSite, architecture: Architecture, received: Weights) -> Answer:
        tools = self.tools
        rates = tools.rates(instruction.round, tools.training.epochs)
        with site.clock("train"):
            trained = tools.trainer.train_network(received, architecture, site.data.train, rates, rng(instruction.seed, "train"))
            update = tools.update(trained.weights, received)
        facts = {"examples": len(site.data.train), **self.facts(site, architecture, trained)}
        diary, _ = tools.test(site, architecture, trained.weights, trained.macs)
        diary = replace(diary, evaluated_architectures=self.scored)
        return Answer(Report(instruction.client, instruction.round, {"update": update}, facts), diary=diary)


@dataclass(frozen=True)
class PhaseSettings:
    retrain: float = setting(0.5, "share of the rounds, at the end, that train what was found and nothing else", low=0, high=1)
    scratch: bool = setting(False, "train it from random weights, as in the paper; else it goes on with those of the supernet")


@dataclass(frozen=True)
class SearchThenTrain(SubnetMethod[Sub]):
    """Rounds that search one architecture for all clients, then rounds that train it."""

    search: ClassVar[str] = "server"

    @property
    def searched(self) -> int:
        """Rounds of the search, at least one."""
        retrain: float = self.settings.retrain
        return max(1, round((1 - retrain) * self.tools.rounds))

    def start(self, seed: int) -> Sub:
        left = self.tools.rounds - self.searched
        if self.settings.scratch and self.tools.averaging.last > left:
            what = "averaging.last reaches back to rounds before `scratch` starts with new weights"
            raise InvalidConfig(f"{what}. Set it to at most {left}", key="averaging.last")
        return super().start(seed)

    def absorb(self, state: Sub, reports: Sequence[Report]) -> Sub:
        after = super().absorb(state, reports)
        if not (self.settings.scratch and after.round == self.searched < self.tools.rounds):
            return after
        fresh = self.tools.initial_supernet(derive_seed(state.seed, "scratch"))
        return replace(after, weights=frozen(fresh), carried={})
