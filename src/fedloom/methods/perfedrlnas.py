"""PerFedRLNAS (Yao and Li, AAAI 2024, Algorithm 1): the server learns a policy for every client and sends it a subnet drawn from it.

A policy is a softmax per gene. A participant trains the subnet it got and reports its update and how accurate it now is; the
server averages every entry of the supernet over the participants whose subnets hold it, and moves each participant's policy by the
policy gradient of its reward (Eq. 8): better than the average client, not much slower than the fastest participant; with
``memory_weight`` also with memory to spare (Eq. 9). A subnet that does not fit into a client's memory is reported by an empty report, and
counts as accuracy 0, all memory used, and the slowest of its round. So the server knows every client's architecture and accuracy; in
exchange only a subnet travels.

Deviations and decisions: accuracy is on validation data (``protocol = paper`` uses test data as the paper did); the average is over
the latest accuracies of all clients seen so far, this round's included, as the paper's text says (its code takes each client's best, and
leaves this round out); round time is worked out for the client's hardware, so that a run repeats (``time = measured`` takes the
clock's); a gene without effect in the drawn subnet is not moved; a client that never took part ends with the mean of the other
clients' policies; normalisation statistics are measured at each client. The authors' code adds updates by share of examples without
dividing by how many clients hold an entry: that is ``averaging = fedavg``. In Eq. 9 all rewards are negative, and policies then
settle on whatever they happen upon; ours counts memory from the mean of the clients, which changes no expectation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch

from fedloom.core.architecture import Architecture
from fedloom.core.boundary import LARGEST_COUNT, Manifest, Upload
from fedloom.core.client_site import ClientSite, Diary
from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import FINISH, Arrays, Instruction, Report, frozen, payload_bytes
from fedloom.core.method import Answer, per_client
from fedloom.core.seeds import derive_seed, rng
from fedloom.core.settings import setting
from fedloom.maths import policy
from fedloom.maths.averaging import AVERAGING
from fedloom.methods.base import METHODS, FederatedMethod, in_supernet, message, without_sum
from fedloom.search import policies
from fedloom.training.peak import MeasuredPeak
from fedloom.training.server import Carried


@dataclass(frozen=True)
class PerFedRLNASSettings:
    rate: float = setting(0.5, "learning rate of Adam for the policies; one Adam per client", low=0)
    time_weight: float = setting(0.001, "reward lost for every second that a client takes longer than the fastest of its round", low=0)
    time: str = setting(
        "analytic",
        "training time: computed for the client's hardware, or measured (then a run does not repeat bit by bit)",
        choices=("analytic", "measured"),
    )
    memory_weight: float = setting(
        0.0, "reward lost if training fills a client's memory (hardware.memory_mb), less in proportion; 1: the paper's Eq. 9", low=0
    )
    memory: str = setting("analytic", "training memory: computed, or the peak measured on a GPU", choices=("analytic", "measured"))
    memory_baseline: bool = setting(
        True, "memory: subtract the mean of all clients' latest shares, as for accuracy; false: Eq. 9 as written, all rewards negative"
    )
    averaging: str = setting("coverage_equal", "how updates are combined; fedavg is what the authors' code does", choices=AVERAGING)


@dataclass(frozen=True)
class PerFedRLNASState:
    round: int
    seed: int
    weights: Arrays
    policies: Arrays = per_client()  # (3, genes, widest) logits and Adam's two moments; of clients that took part
    visits: Arrays = per_client()  # () how often it took part
    accuracies: Arrays = per_client()  # () the latest it reported
    memories: Arrays = per_client()  # () the latest share of its memory that training took, 1 where it did not fit
    carried: Arrays = field(default_factory=dict)  # from round to round, by [averaging]


@METHODS.add(
    "perfedrlnas", PerFedRLNASSettings, "PerFedRLNAS: the server learns a policy per client and sends subnets; accuracies leave the clients"
)
@dataclass(frozen=True)
class PerFedRLNAS(FederatedMethod[PerFedRLNASState]):
    settings: PerFedRLNASSettings

    sums_parts: ClassVar[bool] = True

    search: ClassVar[str] = "server"

    @property
    def uploads(self) -> Manifest:
        manifest = {
            "update": Upload("what local training changed in the subnet", like="weights"),
            "accuracy": Upload("how accurate the subnet then was on the client's own validation data: the reward", high=1),
            "examples": Upload("number of training examples", low=1, high=LARGEST_COUNT),
            "seconds": Upload("how long the round took, which the server sees anyway", high=LARGEST_COUNT),
        }
        if self.settings.memory_weight:
            manifest["memory"] = Upload("share of its memory that training took", high=LARGEST_COUNT)
        return manifest

    # -- server ---------------------------------------------------------------
    def start(self, seed: int) -> PerFedRLNASState:
        if self.settings.memory == "measured" and self.tools.device.type != "cuda":
            what = "perfedrlnas.memory=measured needs a GPU: on a CPU nothing says what one training took"
            raise InvalidConfig(f"{what}. Set perfedrlnas.memory=analytic", key="perfedrlnas.memory")
        return PerFedRLNASState(0, seed, frozen(self.tools.initial_supernet(seed)))

    def instruct(self, state: PerFedRLNASState, client: str, action: str) -> Instruction:
        """The part of the supernet that this round draws for the client; at the end its most likely architecture, as a network."""
        final = action == FINISH
        architecture = (self.chosen if final else self.drawn)(state, client)
        weights = (self.tools.network_of if final else self.tools.part_of)(state.weights, architecture)
        return message(state, client, action, {"weights": weights}, {"architecture": architecture.id})

    def absorb(self, state: PerFedRLNASState, reports: Sequence[Report]) -> PerFedRLNASState:
        reports, change = without_sum(reports)
        trained = [report for report in reports if report.arrays]  # the others had too little memory, or their updates are in the sum
        change = self._change(state, trained) if trained else change
        moved = self.tools.server_steps.after(state.round, Carried(state.weights, state.carried), change)
        return replace(self.learned(state, reports), round=state.round + 1, weights=moved.weights, carried=moved.memory)

    def learned(self, state: PerFedRLNASState, reports: Sequence[Report]) -> PerFedRLNASState:
        """What the policies make of reports; the supernet stays as it is."""
        reached = {report.client: np.array(float(report.facts["accuracy"])) for report in reports if report.facts}
        used = {r.client: np.array(float(r.facts.get("memory", 0.0)) if r.facts else 1.0) for r in reports}
        accuracies, memories = {**state.accuracies, **reached}, {**state.memories, **used}
        learned, visits = dict(state.policies), dict(state.visits)
        for report, reward in zip(reports, self._rewards(reports, accuracies, memories), strict=True):
            client = report.client
            visits[client] = np.array(int(visits.get(client, np.array(0))) + 1)
            learned[client] = self._moved(self._policy(state, client), self.drawn(state, client), reward, int(visits[client]))
        return replace(state, policies=frozen(learned), visits=frozen(visits), accuracies=frozen(accuracies), memories=frozen(memories))

    def supernet_of(self, state: PerFedRLNASState) -> Arrays:
        return state.weights

    # -- policies ---------------------------------------------------------------
    def _policy(self, state: PerFedRLNASState, client: str) -> policies.Policy:
        """One that draws uniformly for a client that has none yet."""
        known = state.policies.get(client)
        return policies.uniform(self.tools.space) if known is None else known

    def _usual(self, state: PerFedRLNASState) -> policy.Table:
        """Logits of the mean policy."""
        sizes = self.tools.space.sizes
        found = [policy.probabilities(known[0], sizes) for _, known in sorted(state.policies.items())]  # as in _mean
        return np.log(np.mean(found, 0) + policy.EPSILON) if found else policy.uniform(sizes)

    def drawn(self, state: PerFedRLNASState, client: str) -> Architecture:
        """What this round draws for a client; the same each time it is asked."""
        draw = rng(state.seed, state.round, client, "architecture")
        return policies.drawn(self.tools.space_of(client), self._policy(state, client)[0], draw)

    def chosen(self, state: PerFedRLNASState, client: str) -> Architecture:
        """The most likely architecture of a client."""
        logits = self._policy(state, client)[0] if client in state.policies else self._usual(state)
        return policies.most_likely(self.tools.space_of(client), logits)

    def _moved(self, known: policies.Policy, architecture: Architecture, reward: float, visit: int) -> policies.Policy:
        moved = policies.moved(self.tools.space, known, architecture, reward, visit, self.settings.rate)
        if not np.isfinite(moved).all():
            what = "A policy is no longer finite: its reward or its step was too large"
            cure = "Lower perfedrlnas.time_weight, perfedrlnas.memory_weight or perfedrlnas.rate"
            raise InvalidConfig(f"{what}. {cure}", key="perfedrlnas")
        return moved

    @np.errstate(over="ignore", invalid="ignore")  # _moved refuses what is not finite
    def _rewards(self, reports: Sequence[Report], accuracies: Arrays, memories: Arrays) -> policy.Numbers:
        """Of those who reported, in their order; accuracies and memories: the latest of all clients."""
        if not reports:
            return np.empty(0)
        own = self.settings
        slowest = max((float(report.facts["seconds"]) for report in reports if report.facts), default=0.0)
        failed = {"accuracy": 0.0, "seconds": slowest}
        rows = [report.facts or failed for report in reports]
        reached, seconds = (np.array([float(row[name]) for row in rows]) for name in failed)
        memory = np.array([float(memories[report.client]) for report in reports])
        usual = _mean(memories) if own.memory_baseline else 0.0
        return policy.rewards(reached, _mean(accuracies), seconds, own.time_weight, memory - usual, own.memory_weight)

    # -- aggregation ------------------------------------------------------------
    def _change(self, state: PerFedRLNASState, reports: Sequence[Report]) -> Arrays:
        """The paper's: subnets padded to the supernet, every entry averaged over those that hold it, others unchanged."""
        updates = [(self.drawn(state, report.client), report.arrays["update"]) for report in reports]
        examples = [float(report.facts["examples"]) for report in reports]
        return self.tools.change(state.weights, updates, examples, AVERAGING[self.settings.averaging].make)

    # -- client ---------------------------------------------------------------
    def answer(self, instruction: Instruction, site: ClientSite) -> Answer:
        tools = self.tools
        architecture = Architecture.parse(str(instruction.facts["architecture"]))
        received = tools.tensors(instruction.arrays["weights"])
        if instruction.action == FINISH:
            model, diary = tools.personalise(site, architecture, received, instruction.seed)
            return Answer(Report(instruction.client, instruction.round), diary=diary, model=model)
        entries = sum(tensor.numel() for tensor in received.values())
        needed = tools.training_memory_mb(architecture, entries, len(site.data.train))
        use, measured = site.hardware.utilisation(needed), self.settings.memory == "measured"
        try:
            if use > 1 and not measured:
                raise torch.OutOfMemoryError
            peak = MeasuredPeak(tools.device) if measured else None
            with site.clock("train"):
                rates = tools.rates(instruction.round, tools.training.epochs)
                trained = tools.trainer.train_network(received, architecture, site.data.train, rates, rng(instruction.seed, "train"))
            if peak is not None:
                use = site.hardware.utilisation(peak.megabytes())
                if use > 1:  # the simulating GPU has more than the client
                    raise torch.OutOfMemoryError
        except torch.OutOfMemoryError:  # simulated or real: this client goes on, with another subnet next time
            diary = Diary(architecture=architecture.id, notes={"out_of_memory": 1.0, "memory": use})
            return Answer(Report(instruction.client, instruction.round), diary=diary)
        update = tools.update(trained.weights, received)
        with site.clock("score"):
            statistics = tools.scorer.calibrate(trained.weights, architecture, site.data.train)
            selecting = tools.selecting(site.data)
            score = tools.scorer.score_network(trained.weights, architecture, statistics, selecting)
            tools.count_scoring(site, [architecture], len(selecting))
        diary, _ = tools.test(site, architecture, trained.weights, trained.macs)
        facts = {
            "accuracy": score.accuracy,
            "examples": len(site.data.train),
            "seconds": self._seconds(instruction, site, trained.macs, update),
        }
        if self.settings.memory_weight:
            facts["memory"] = use
        notes = {"reported_accuracy": score.accuracy, "out_of_memory": 0.0, "memory": use}
        report = Report(instruction.client, instruction.round, {"update": update}, facts)
        return Answer(report, diary=replace(diary, evaluated_architectures=1, notes=notes))

    def summand(self, instruction: Instruction, report: Report) -> Report | None:
        return in_supernet(self.tools, instruction, report)

    def welcome(self, state: PerFedRLNASState, client: str, site: ClientSite, rounds: int) -> Answer:
        """A newcomer alone with the frozen supernet (Fig. 5): its policy learns from its own validation scores. Fine-tuned is the best of
        all it tried and its most likely architecture."""
        tools, weights = self.tools, self.tools.tensors(state.weights)

        def score(architecture: Architecture) -> float:
            plain = tools.supernet.plain(weights, architecture)
            statistics = tools.scorer.calibrate(plain, architecture, site.data.train)
            return tools.scorer.score_network(plain, architecture, statistics, tools.selecting(site.data)).accuracy

        draws = (rng(state.seed, "newcomer", client, number) for number in range(rounds))
        with site.clock("search"):
            tried = policies.tried_alone(tools.space, self._policy(state, client), score, draws, self._moved)
        best = max(tried, key=lambda architecture: tried[architecture])  # of equals the first
        model, diary = tools.personalise(site, best, tools.supernet.plain(weights, best), derive_seed(state.seed, state.round, client))
        return Answer(Report(client, state.round), diary=replace(diary, evaluated_architectures=len(tried)), model=model)

    def _seconds(self, instruction: Instruction, site: ClientSite, macs: int, update: Arrays) -> float:
        """Round time: training, and the subnet on its way there and back."""
        bytes = payload_bytes(instruction) + sum(array.nbytes for array in update.values())
        if self.settings.time == "analytic":
            return site.hardware.seconds(macs, bytes)
        return site.clock.seconds["train"] + site.hardware.seconds(0, bytes)


def _mean(latest: Arrays) -> float:
    """Over clients, in an order that does not depend on who came first; 0 without any."""
    return float(np.mean([float(value) for _, value in sorted(latest.items())])) if latest else 0.0
