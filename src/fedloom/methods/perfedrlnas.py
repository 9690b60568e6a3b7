"""PerFedRLNAS (Yao and Li, AAAI 2024, Algorithm 1): the server learns a policy for every client and sends it a subnet drawn from it.

A policy is a softmax per gene. A participant trains the subnet it got and reports its update and how accurate it now is; the
server averages every entry of the supernet over the participants whose subnets hold it, and moves each participant's policy by the
policy gradient of its reward (Eq. 8): better than the average client, not much slower than the fastest participant. So the server
knows every client's architecture and accuracy; in exchange only a subnet travels.

Deviations and decisions: accuracy is on validation data (``protocol = paper`` uses test data as the paper did); the average is over
the latest accuracies of all clients seen so far, this round's included, as the paper's text says (its code takes each client's best, and
leaves this round out); round time is worked out from multiply-accumulates and bytes, so that a run repeats (``time = measured`` takes
the clock's); a gene without effect in the drawn subnet is not moved; a client that never took part ends with the mean of the other
clients' policies; normalisation statistics are measured at each client. The authors' code adds updates by share of examples without
dividing by how many clients hold an entry: that is ``averaging = fedavg``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedloom.core.architecture import Architecture
from fedloom.core.boundary import Manifest, Upload
from fedloom.core.client_site import ClientSite
from fedloom.core.messages import FINISH, TRAIN, Arrays, Instruction, Report, frozen, payload_bytes
from fedloom.core.method import Answer
from fedloom.core.seeds import derive_seed, rng
from fedloom.core.settings import setting
from fedloom.maths import policy
from fedloom.maths.averaging import AVERAGING
from fedloom.methods.base import METHODS
from fedloom.training.bench import Bench

TRIES = 20  # draws before one over budget is reduced instead
BACKWARD = 2  # a backward pass costs about two forward ones


@dataclass(frozen=True)
class PerFedRLNASSettings:
    rate: float = setting(0.5, "learning rate of Adam for the policies; one Adam per client", low=0)
    time_weight: float = setting(0.001, "reward lost per second that a client takes longer than the fastest of its round", low=0)
    time: str = setting(
        "analytic",
        "what a round takes: multiply-accumulates and bytes at the speeds below, or the clock's (then a run does not repeat bit by bit)",
        choices=("analytic", "measured"),
    )
    gmacs: float = setting(100.0, "time: thousand million multiply-accumulates that a client's device trains per second", low=1e-6)
    mbits: float = setting(100.0, "time: million bits per second of a client's link, each way", low=1e-6)
    averaging: str = setting("coverage_equal", "how updates are combined; fedavg is what the authors' code does", choices=AVERAGING)


@dataclass(frozen=True)
class PerFedRLNASState:
    round: int
    seed: int
    weights: Arrays
    policies: Arrays  # client -> (3, genes, widest) logits and Adam's two moments; of clients that took part
    visits: Arrays  # client -> () how often it took part
    accuracies: Arrays  # client -> () the latest it reported


@METHODS.add(
    "perfedrlnas", PerFedRLNASSettings, "PerFedRLNAS: the server learns a policy per client and sends subnets; accuracies leave the clients"
)
@dataclass(frozen=True)
class PerFedRLNAS:
    settings: PerFedRLNASSettings
    bench: Bench

    @property
    def uploads(self) -> Manifest:
        manifest = {
            "update": Upload("what local training changed in the subnet", like="weights"),
            "accuracy": Upload("how accurate the subnet then was on the client's own validation data: the reward"),
            "examples": Upload("number of training examples", low=1),
        }
        if self.settings.time == "measured":
            manifest["seconds"] = Upload("how long training took")
        return manifest

    # -- server ---------------------------------------------------------------
    def start(self, seed: int) -> PerFedRLNASState:
        return PerFedRLNASState(0, seed, frozen(self.bench.initial_supernet(seed)), {}, {}, {})

    def plan(self, state: PerFedRLNASState, clients: Sequence[str]) -> list[Instruction]:
        drawn = self.bench.draw_participants(state.seed, state.round, list(clients))
        return [self._instruct(state, client) for client in drawn]

    def absorb(self, state: PerFedRLNASState, reports: Sequence[Report]) -> PerFedRLNASState:
        if not reports:
            return replace(state, round=state.round + 1)
        sent = {report.client: self._drawn(state, report.client) for report in reports}
        policies, visits = dict(state.policies), dict(state.visits)
        accuracies = {**state.accuracies, **{r.client: np.array(float(r.facts["accuracy"])) for r in reports}}
        for report, reward in zip(reports, self._rewards(state, reports, sent, accuracies), strict=True):
            client = report.client
            visits[client] = np.array(int(visits.get(client, np.array(0))) + 1)
            policies[client] = self._moved(self._policy(state, client), sent[client], reward, int(visits[client]))
        return replace(
            state,
            round=state.round + 1,
            weights=frozen(self._averaged(state, reports, sent)),
            policies=frozen(policies),
            visits=frozen(visits),
            accuracies=frozen(accuracies),
        )

    def finished(self, state: PerFedRLNASState) -> bool:
        return state.round >= self.bench.rounds

    def farewell(self, state: PerFedRLNASState, client: str) -> Instruction:
        """The client's most likely architecture, as a network of its own."""
        logits = self._policy(state, client)[0] if client in state.policies else self._usual(state)
        architecture = self._fitting(policy.most_likely(logits, self.bench.space.sizes))
        plain = self.bench.arrays(self.bench.supernet.plain(self.bench.tensors(state.weights), architecture))
        return self._message(state, client, FINISH, architecture, plain)

    def _instruct(self, state: PerFedRLNASState, client: str) -> Instruction:
        architecture = self._drawn(state, client)
        own = {name: state.weights[name][region] for name, region in self.bench.supernet.regions(architecture).items()}
        return self._message(state, client, TRAIN, architecture, frozen(own))

    def _message(self, state: PerFedRLNASState, client: str, action: str, architecture: Architecture, weights: Arrays) -> Instruction:
        seed = derive_seed(state.seed, state.round, client)
        return Instruction(client, state.round, action, seed, {"weights": weights}, {"architecture": architecture.id})

    # -- policies ---------------------------------------------------------------
    def _policy(self, state: PerFedRLNASState, client: str) -> np.ndarray:
        """(3, genes, widest); zeros, which draw uniformly, for a client that has none yet."""
        known = state.policies.get(client)
        return np.stack([policy.uniform(self.bench.space.sizes)] * 3) if known is None else known

    def _usual(self, state: PerFedRLNASState) -> policy.Table:
        """Logits of the mean policy."""
        sizes = self.bench.space.sizes
        found = [policy.probabilities(known[0], sizes) for known in state.policies.values()]
        return np.log(np.mean(found, 0) + policy.EPSILON) if found else policy.uniform(sizes)

    def _drawn(self, state: PerFedRLNASState, client: str) -> Architecture:
        """What this round draws for a client; the same each time it is asked."""
        logits, sizes = self._policy(state, client)[0], self.bench.space.sizes
        draw = rng(state.seed, state.round, client, "architecture")
        for _ in range(TRIES):
            chosen = policy.draw(logits, sizes, draw)
            if self._fitting(chosen) == self.bench.space.canonical(chosen):
                break
        return self._fitting(chosen)

    def _fitting(self, chosen: policy.Genes) -> Architecture:
        """Within the budget, if there is one."""
        space = self.bench.space
        return space.decode(space.encode(space.canonical(chosen)))

    def _moved(self, known: np.ndarray, architecture: Architecture, reward: float, visit: int) -> np.ndarray:
        """One step of policy gradient ascent (Eq. 7)."""
        space = self.bench.space
        gradient = reward * policy.log_gradient(known[0], space.sizes, np.array(architecture.choices))
        gradient[~space.active(architecture.choices)] = 0.0
        change, moments = policy.adam(known[1:], gradient, visit, self.settings.rate)
        return np.concatenate([(known[0] + change)[None], moments])

    def _rewards(self, state: PerFedRLNASState, reports: Sequence[Report], sent: dict[str, Architecture], accuracies: Arrays) -> np.ndarray:
        reported = np.array([float(accuracies[report.client]) for report in reports])
        seconds = np.array([self._seconds(report, sent[report.client]) for report in reports])
        average = float(np.mean([float(accuracy) for _, accuracy in sorted(accuracies.items())]))
        return policy.rewards(reported, average, seconds, self.settings.time_weight)

    def _seconds(self, report: Report, architecture: Architecture) -> float:
        """Round time: training, and the subnet on its way there and back."""
        own, training = self.settings, self.bench.training
        images = training.epochs * int(report.facts["examples"])
        work = (1 + BACKWARD) * self.bench.space.cost(architecture).macs * images / (own.gmacs * 1e9)
        busy = float(report.facts["seconds"]) if own.time == "measured" else work
        return busy + 2 * 8 * payload_bytes(report) / (own.mbits * 1e6)

    # -- aggregation ------------------------------------------------------------
    def _averaged(self, state: PerFedRLNASState, reports: Sequence[Report], sent: dict[str, Architecture]) -> dict[str, np.ndarray]:
        """The paper's: subnets padded to the supernet, every entry averaged over those that hold it, others unchanged."""
        supernet, updates = self.bench.supernet, []
        for report in reports:
            padded = {name: np.zeros_like(array) for name, array in state.weights.items()}
            for name, region in supernet.regions(sent[report.client]).items():
                padded[name][region] = report.arrays["update"][name]
            updates.append(padded)
        coverage = [self.bench.arrays(supernet.coverage({sent[report.client]: 1})) for report in reports]
        mean = AVERAGING[self.settings.averaging](updates, coverage, [float(report.facts["examples"]) for report in reports])
        return {name: array + mean[name] for name, array in state.weights.items()}

    # -- client ---------------------------------------------------------------
    def answer(self, instruction: Instruction, site: ClientSite) -> Answer:
        bench = self.bench
        architecture = Architecture.parse(str(instruction.facts["architecture"]))
        received = bench.tensors(instruction.arrays["weights"])
        if instruction.action == FINISH:
            model, diary = bench.personalise(site, architecture, received, instruction.seed)
            return Answer(Report(instruction.client, instruction.round), diary=diary, model=model)
        with site.clock("train"):
            rates = bench.rates(instruction.round, bench.training.epochs)
            trained = bench.trainer.train_network(received, architecture, site.data.train, rates, rng(instruction.seed, "train"))
            update = bench.arrays({name: tensor - received[name] for name, tensor in trained.weights.items()})
        with site.clock("score"):
            statistics = bench.scorer.calibrate(trained.weights, architecture, site.data.train)
            score = bench.scorer.score_network(trained.weights, architecture, statistics, bench.selecting(site.data))
        diary, _ = bench.test(site, architecture, trained.weights, trained.macs)
        facts: dict[str, float] = {"accuracy": score.accuracy, "examples": len(site.data.train)}
        if self.settings.time == "measured":
            facts["seconds"] = site.clock.seconds["train"]
        report = Report(instruction.client, instruction.round, {"update": update}, facts)
        return Answer(report, diary=replace(diary, evaluated_architectures=1, notes={"reported_accuracy": score.accuracy}))
