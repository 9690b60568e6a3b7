"""What may be set to protect clients, and who sent what so far, which is what the loss of privacy is counted from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedloom.core.boundary import Manifest, Upload
from fedloom.core.settings import setting

UPDATE, EXAMPLES = "update", "examples"  # the two fields that clip and noise know how to protect
COVERAGE = "coverage"  # what secure sums can hide besides
OF_SUMS: Manifest = {  # what a site sends with ``privacy.secure`` in place of what its method declares
    "card": Upload("public keys for the round's sums, signed"),
    "shares": Upload("shares of this site's keys, sealed for one other site each; the server cannot read them"),
    "coverage": Upload("which entries were trained, masked; the server can read the sum over sites only"),
    "update": Upload("what local training changed, masked; the server can read the sum over sites only"),
    "opened": Upload("shares that take the masks away from a sum, and from nothing else"),
}
READERS = ("server", "others")  # whom epsilon is said for: who reads reports, and who reads only the weights of each round


@dataclass(frozen=True)
class PrivacySettings:
    clip: float = setting(0.0, "longest update (Euclidean norm over all its arrays); a client shortens what is longer; 0: off", low=0)
    noise: float = setting(
        0.0,
        "Gaussian noise in the sum of a round's updates, in multiples of privacy.clip; every participant adds its share; 0: off",
        low=0,
        high=1e6,
    )
    delta: float = setting(
        1e-5, "probability with which epsilon may fail to hold, below one over the number of clients", low=1e-12, high=0.1
    )
    secure: bool = setting(False, "the server gets sums of updates and no single one; clients then count the same, unless privacy.examples")
    least: int = setting(3, "secure: fewest clients in a sum, and fewest that trained an entry for it to be averaged", low=2)
    range: float = setting(8.0, "secure: largest change of one entry that a client sends; larger ones are cut", low=1e-6, high=1e6)
    examples: int = setting(
        0, "secure: clients count by their training examples, at most this many (not with coverage); 0: all the same", low=0, high=10**6
    )


@dataclass
class Departures:
    """Who sent an update how often, and how many sent one in the same rounds. It does not grow with rounds."""

    sent: dict[str, int] = field(default_factory=dict)  # client -> updates that left it, also those that came too late
    _shares: dict[str, float] = field(default_factory=dict)  # client -> sum of 1 / summed over its rounds, but the newest
    _round: int = -1
    _summed: list[str] = field(default_factory=list)  # of the newest round: whose updates are in its sum

    def add(self, client: str, round: int, late: bool) -> None:
        """One update, the rounds in their order."""
        if round != self._round:
            self._shares, self._round, self._summed = dict(self.shares), round, []
        self.sent[client] = self.sent.get(client, 0) + 1
        if not late:
            self._summed.append(client)

    @property
    def shares(self) -> Mapping[str, float]:
        """client -> sum, over the rounds whose sum holds its update, of one over the number of updates in that sum."""
        newest = {client: self._shares.get(client, 0.0) + 1 / len(self._summed) for client in self._summed}
        return {**self._shares, **newest}
