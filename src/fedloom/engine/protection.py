"""What a client does to its update before it leaves, and what the updates that left tell about one client: ``[privacy]``."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from fedloom.core.boundary import Manifest
from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import Report
from fedloom.core.privacy import EXAMPLES, READERS, UPDATE, Departures, PrivacySettings
from fedloom.core.seeds import derive_seed
from fedloom.maths.privacy import LARGEST, epsilon, need_accountant, noisy, shortened

Key = Callable[[Report], bytes]  # of the noise in a report; whoever has it can take the noise away


@dataclass(frozen=True)
class Protection:
    """participants: of a round. Each of them adds its share of the noise."""

    settings: PrivacySettings
    participants: int
    key: Key

    @property
    def share(self) -> float:
        """Standard deviation of the noise in one update, in multiples of ``clip``."""
        return self.settings.noise / math.sqrt(self.participants)

    def of(self, report: Report) -> Report:
        """The report as it may leave: its update no longer than ``clip``, with this client's share of the noise.

        With noise every client counts alike, and does not say how many images it has: weights would be data without noise.
        """
        clip, update = self.settings.clip, report.arrays.get(UPDATE)
        if not clip or update is None:
            return report
        update, facts = shortened(update, clip), report.facts
        if self.share:
            update = noisy(update, self.share * clip, self.key(report))
            facts = {name: 1 if name == EXAMPLES else fact for name, fact in facts.items()}
        return replace(report, arrays={**report.arrays, UPDATE: update}, facts=facts)


def simulated(seed: int) -> Key:
    """In a simulation noise follows from the run's seed, so that a run can be repeated. It protects nobody: a site draws its own."""
    return lambda report: hashlib.sha256(f"noise {derive_seed(seed, 'noise', report.client, report.round)}".encode()).digest()


def check_private(settings: PrivacySettings, name: str, uploads: Manifest, rule: str, participants: int) -> None:
    """Refuse noise where it would protect less than it seems to. name: the method's; rule: by which its server averages updates, empty if
    it makes something else of them."""
    if not settings.noise:
        return
    if not settings.clip:
        what = "privacy.noise is measured in multiples of privacy.clip, which is 0"
        raise InvalidConfig(f"{what}. Set privacy.clip to the length of a usual update, for example 1", key="privacy.clip")
    if more := sorted(set(uploads) - {UPDATE, EXAMPLES}):
        what = f"privacy.noise protects updates, and {name} also sends {', '.join(more)}"
        cure = f"Set {name}.averaging=fedavg, which does without" if more == ["coverage"] else "Choose another method"
        raise InvalidConfig(f"{what}. {cure}, or set privacy.noise=0", key="privacy.noise")
    if uploads and rule != "fedavg":
        what = f"privacy.noise protects the mean of updates, and the server of {name} computes something else"
        raise InvalidConfig(f"{what}. Set {name}.averaging=fedavg if it has that setting, or privacy.noise=0", key="privacy.noise")
    most = settings.clip * (1 + LARGEST * settings.noise / math.sqrt(participants))
    if settings.secure and most > settings.range:
        what = f"With noise an entry of an update can be {most:.3g}, and secure sums cut what is larger than {settings.range:g}"
        raise InvalidConfig(f"{what}: noise that is cut protects less. Set privacy.range={math.ceil(most)}", key="privacy.range")


@dataclass(frozen=True)
class Account:
    """How private the clients' updates are so far, if each of them keeps to ``Protection``."""

    settings: PrivacySettings
    participants: int

    def __post_init__(self) -> None:
        if self.settings.noise:
            need_accountant()  # before the first round, not after it

    def spent(self, departures: Departures) -> dict[str, Any]:
        """What result.json says of it; empty without noise. All epsilons are of the client for which they are largest.

        Two data sets are neighbours if they differ in what one client has; who takes part is public. So nothing is gained from clients
        being drawn. The server reads single updates, each with one share of the noise; all others, and the server where sums are secure,
        read only sums, with the shares of all that are in them.
        """
        shares = max(departures.shares.values(), default=0.0)
        return self._said(shares if self.settings.secure else max(departures.sent.values(), default=0), shares)

    def at_site(self, sent: int) -> dict[str, Any]:
        """The same for a site, which knows how many updates it sent, and takes it that the sum of each round had all shares."""
        shares = sent / self.participants
        return self._said(shares if self.settings.secure else sent, shares)

    def _said(self, alone: float, shares: float) -> dict[str, Any]:
        """alone: updates of one client; shares: sum of one over the number of updates in their sums."""
        own = self.settings
        if not own.noise:
            return {}
        of_one = self.participants / own.noise**2  # 1 / z^2 of an update alone
        found = (round(epsilon(number * of_one, own.delta), 4) for number in (alone, shares))
        return {
            "clip": own.clip,
            "noise": own.noise,
            "delta": own.delta,
            "epsilon": dict(zip(READERS, found, strict=True)),
            "accountant": f"dp-accounting {metadata.version('dp-accounting')}",
        }
