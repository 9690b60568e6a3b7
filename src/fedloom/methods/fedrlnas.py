"""FedRLNAS (Yao, Wang, Xu, Xu, Shao, Zhang, Liu and Xu, *Federated Model Search via Reinforcement Learning*, ICDCS 2021, Algorithm 1).

One policy for all clients, a softmax per gene, at the server. Every participant gets a subnet drawn from it, trains it and reports its
update and how accurate it now is. The policy moves by the mean policy gradient of the rewards; a reward is counted from a baseline that
follows the mean accuracy. Three phases: in the first the policy rests and the supernet warms up, in the second it learns, in the third
the most likely architecture alone is trained by all.

Deviations and decisions: accuracy is on validation data after local training (``protocol = paper`` uses test data, as the public code
does); entries are averaged over the participants that hold them; a gene without effect in a subnet is not moved by it; the third phase
goes on with the supernet's weights unless ``scratch`` says otherwise; every client fine-tunes at the end. Late reports are not waited for
and not mended: the paper's compensation of stale ones is left out. Normalisation statistics are measured at each client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from fedloom.core.architecture import Architecture
from fedloom.core.boundary import Manifest, Upload
from fedloom.core.client_site import ClientSite
from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import Arrays, Fact, Report, frozen
from fedloom.core.seeds import rng
from fedloom.core.settings import setting
from fedloom.maths import policy
from fedloom.maths.averaging import AVERAGING
from fedloom.methods.base import METHODS
from fedloom.methods.subnets import PhaseSettings, SearchThenTrain, SubnetState
from fedloom.search import policies
from fedloom.training.local import Trained


@dataclass(frozen=True)
class FedRLNASSettings(PhaseSettings):
    rate: float = setting(0.003, "learning rate of Adam for the policy; raise it for runs of few rounds", low=0)
    follow: float = setting(0.99, "share of a round's mean accuracy in the baseline that rewards are counted from", low=0, high=1)
    warmup: float = setting(0.1, "share of the rounds before the policy learns", low=0, high=1)
    averaging: str = setting("coverage_equal", "how updates are combined", choices=AVERAGING)


@dataclass(frozen=True)
class FedRLNASState(SubnetState):
    """policy: (3, genes, widest) logits and Adam's two moments; steps: that it made. In it also the baseline, ()."""

    policy: Arrays = field(default_factory=dict)
    steps: int = 0


@METHODS.add("fedrlnas", FedRLNASSettings, "FedRLNAS: the server learns one policy for all clients and sends subnets; accuracies leave")
@dataclass(frozen=True)
class FedRLNAS(SearchThenTrain[FedRLNASState]):
    settings: FedRLNASSettings

    state: ClassVar[type[Any]] = FedRLNASState
    scored: ClassVar[int] = 1

    @property
    def uploads(self) -> Manifest:
        accuracy = Upload("how accurate the subnet then was on the client's own validation data: the reward", high=1)
        return {**super().uploads, "accuracy": accuracy}

    # -- server ---------------------------------------------------------------
    def start(self, seed: int) -> FedRLNASState:
        """A policy that knows nothing, and chance as the baseline."""
        space, own, rounds = self.tools.space, self.settings, self.tools.rounds
        if self._warmed_up >= self.searched:
            what = f"fedrlnas.warmup={own.warmup} and fedrlnas.retrain={own.retrain} leave none of {rounds} rounds to search"
            raise InvalidConfig(f"{what}. Lower one of them", key="fedrlnas.warmup")
        known = {"table": policies.uniform(space), "baseline": np.array(1 / space.image.classes)}
        return replace(super().start(seed), policy=frozen(known))

    @property
    def _warmed_up(self) -> int:
        return round(self.settings.warmup * self.tools.rounds)

    def subnet(self, state: FedRLNASState, client: str, final: bool) -> Architecture:
        space, logits = self.tools.space_of(client), state.policy["table"][0]
        if final or state.round >= self.searched:
            return policies.most_likely(space, logits)
        return policies.drawn(space, logits, rng(state.seed, state.round, client, "architecture"))

    def learned(self, state: FedRLNASState, reports: Sequence[Report]) -> FedRLNASState:
        """One step of the policy, after the warm-up and before the last phase."""
        if not (reports and self._warmed_up <= state.round < self.searched):
            return state
        accuracies = np.array([float(report.facts["accuracy"]) for report in reports])
        before = float(state.policy["baseline"])
        baseline = before + self.settings.follow * (float(accuracies.mean()) - before)
        tried = [self.subnet(state, report.client, False) for report in reports]
        gradients = [policies.gradient(self.tools.space, state.policy["table"][0], one) for one in tried]
        mean = np.mean([reward * gradient for reward, gradient in zip(accuracies - baseline, gradients, strict=True)], axis=0)
        table, steps = state.policy["table"], state.steps + 1
        change, moments = policy.adam(table[1:], mean, steps, self.settings.rate)
        moved = {"table": np.concatenate([(table[0] + change)[None], moments]), "baseline": np.array(baseline)}
        return replace(state, policy=frozen(moved), steps=steps)

    # -- client ---------------------------------------------------------------
    def facts(self, site: ClientSite, architecture: Architecture, trained: Trained) -> dict[str, Fact]:
        tools = self.tools
        with site.clock("score"):
            statistics, selecting = tools.scorer.calibrate(trained.weights, architecture, site.data.train), tools.selecting(site.data)
            score = tools.scorer.score_network(trained.weights, architecture, statistics, selecting)
            tools.count_scoring(site, [architecture], len(selecting))
        return {"accuracy": score.accuracy}
