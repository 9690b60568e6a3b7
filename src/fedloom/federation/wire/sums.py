"""What server and sites say to each other to make a secure sum (Bonawitz et al., CCS 2017), and what binds it together.

After a site has trained, it keeps its report. Then, for the sums of a round:

    KEYS    every site makes keys for this session, and signs them with its registered key
    SHARES  it gets the keys of all, checks their signatures, and sends each site a sealed share of its secrets, through the server
    MASKED  it sends its part of a sum, under masks that it shares with every other site and a mask of its own
    OPEN    it hears whose parts arrived, and sends shares: of these sites' own masks, and of the pair keys of those that were lost

Counts of who trained what and updates are two sums with keys of their own. No site opens a sum twice in a round, so that nobody can be told
both that a site was lost and that it arrived, and no two sums differ by one site.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from fedloom.core.errors import BadMessage
from fedloom.core.messages import Arrays
from fedloom.federation.wire.signatures import der, sign, verified
from fedloom.maths.masks import KEY, SEED, derived, public_of

KEYS, SHARES, MASKED, OPEN = ACTIONS = ("sum keys", "sum shares", "sum", "sum open")
SHARED = SEED + KEY  # bytes of a share for one sum: of the site's own mask, and of its pair key


@dataclass(frozen=True)
class Secrets:
    """A site's private half of a session: all of it follows from one random secret."""

    secret: bytes

    @cached_property
    def channel(self) -> bytes:
        return derived(self.secret, "channel")

    def pair(self, label: str) -> bytes:
        """Private key of the masks that it shares with others, in the sum of this label."""
        return derived(self.secret, label, "pair")

    def own(self, label: str) -> bytes:
        """Seed of its own mask."""
        return derived(self.secret, label, "own")[:SEED]


@dataclass(frozen=True)
class Card:
    """A site's public half of a session. With each pair key comes a digest of the own mask's seed, so that wrong shares are noticed."""

    channel: bytes
    pairs: tuple[bytes, ...]  # by label, as are the digests
    digests: tuple[bytes, ...]
    signer: bytes = b""  # public key of the site, which is registered
    signature: bytes = b""

    @classmethod
    def unsigned(cls, own: Secrets, labels: Sequence[str]) -> Card:
        pairs, digests = tuple(public_of(own.pair(label)) for label in labels), tuple(digest_of(own.own(label)) for label in labels)
        return cls(public_of(own.channel), pairs, digests)

    def signed(self, where: bytes, key: Any) -> Card:
        """where: as ``Roll.place`` says it; key: the site's registered one."""
        return replace(self, signer=der(key.public_key()), signature=sign(where + self.keys, key))

    @property
    def keys(self) -> bytes:
        return b"".join((self.channel, *self.pairs, *self.digests))

    def to_array(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.keys + len(self.signer).to_bytes(2, "big") + self.signer + self.signature, np.uint8)

    @classmethod
    def from_array(cls, array: Any, labels: Sequence[str]) -> Card:
        data, count = bytes_of(array), len(labels)
        end = KEY * (1 + 2 * count)
        parts = [data[start : start + KEY] for start in range(0, end, KEY)]
        signer = end + 2 + int.from_bytes(data[end : end + 2], "big")
        if len(data) <= signer:
            raise BadMessage("A site's keys for the sum are cut off")
        return cls(parts[0], tuple(parts[1 : 1 + count]), tuple(parts[1 + count :]), data[end + 2 : signer], data[signer:])


@dataclass(frozen=True)
class Roll:
    """The sites of a session and their keys. All masks and seals are bound to its digest: another roll is another sum."""

    federation: str
    round: int
    session: str
    labels: tuple[str, ...]
    cards: Mapping[str, Card]  # by site, in the order of names

    @classmethod
    def read(cls, federation: str, round: int, session: str, labels: tuple[str, ...], arrays: Arrays) -> Roll:
        cards = {site: Card.from_array(array, labels) for site, array in sorted(arrays.items())}
        return cls(federation, round, session, labels, cards)

    def to_arrays(self) -> Arrays:
        return {site: card.to_array() for site, card in self.cards.items()}

    def place(self, site: str) -> bytes:
        """What a card's signature speaks of besides its keys."""
        return _joined("fedloom sum keys", self.federation, str(self.round), self.session, *self.labels, site)

    def check(self, fingerprints: Mapping[str, str]) -> None:
        """Every card is signed with the key that was agreed on for its site."""
        for site, card in self.cards.items():
            if hashlib.sha256(card.signer).hexdigest() != fingerprints.get(site):
                raise BadMessage(f"The keys of {site} are signed with another key than was agreed on (federation.keys)", client=site)
            if not verified(card.signature, self.place(site) + card.keys, card.signer):
                raise BadMessage(f"The keys of {site} are not signed by it for this sum", client=site)

    @cached_property
    def digest(self) -> str:
        whole = [self.place(site) + card.keys for site, card in self.cards.items()]
        return hashlib.sha256(b"".join(len(part).to_bytes(4, "big") + part for part in whole)).hexdigest()

    def number(self, site: str) -> int:
        """Of its shares."""
        return 1 + list(self.cards).index(site)

    def pairs(self, label: str, sites: Sequence[str]) -> dict[str, bytes]:
        which = self.labels.index(label)
        return {site: self.cards[site].pairs[which] for site in sites}

    def context(self, label: str, members: Sequence[str], seen: bytes) -> tuple[str, ...]:
        """Of all masks in one sum. seen: which entries may be seen."""
        return (self.federation, str(self.round), self.digest, label, ",".join(members), hashlib.sha256(seen).hexdigest())

    def seal(self, sender: str, receiver: str) -> tuple[str, ...]:
        """Context of the key that seals shares."""
        return (self.federation, str(self.round), self.digest, "shares", sender, receiver)


def digest_of(seed: bytes) -> bytes:
    return hashlib.sha256(b"fedloom sum seed" + seed).digest()


def bytes_of(array: Any) -> bytes:
    if array.dtype != np.uint8 or array.ndim != 1:
        raise BadMessage("A part of the sum's messages is not made of bytes")
    return bytes(array.tobytes())


def names_in(text: object) -> list[str]:
    """Sites, in their order and each once."""
    names = str(text).split(",")
    if names != sorted(set(names)):
        raise BadMessage("The sites of a sum must be named in order, each once")
    return names


def _joined(*parts: str) -> bytes:
    return b"".join(len(part.encode()).to_bytes(4, "big") + part.encode() for part in parts)
