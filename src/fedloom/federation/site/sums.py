"""A site's part in secure sums: it masks what it adds, and helps to open each sum of a round once.

What must outlive a kill is on disk before anything leaves: the secret of the session, what was masked in it, and what was opened. A site
answers to the same question with the same words, and to another one about the same sum not at all.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.errors import BadMessage, DamagedRun
from fedloom.core.messages import Instruction, Report
from fedloom.core.privacy import COVERAGE, UPDATE
from fedloom.engine.sums import Sums
from fedloom.federation.wire.sums import KEYS, MASKED, OPEN, SHARED, SHARES, Card, Roll, Secrets, bytes_of, names_in
from fedloom.files import read_plain, write_file
from fedloom.maths.masks import SEED, add_mask, agreed, derived, pairwise, sealed, split, threshold, unsealed
from fedloom.maths.sums import Bits

STATE = Path("state") / "sums.json"
SESSION = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Session:
    """What a site remembers of its newest session."""

    round: int = -1
    name: str = ""
    secret: str = ""  # hexadecimal
    masked: Mapping[str, str] = field(default_factory=dict)  # label -> digest of the one context it was masked for, in this session
    opened: Mapping[str, str] = field(default_factory=dict)  # label -> digest of the one way it was opened, in this round


@dataclass
class Member:
    """site: its name; key: its registered private key; fingerprints: of all sites' public keys."""

    site: str
    key: Any
    federation: str
    fingerprints: Mapping[str, str]
    sums: Sums
    folder: Path

    def __post_init__(self) -> None:
        self._session = self._read()
        self._trusted = ""  # digest of the roll whose signatures were checked last

    def answer(self, instruction: Instruction, held: Report) -> Report:
        """held: what the method would have sent in this round."""
        steps = {KEYS: self._keys, SHARES: self._shares, MASKED: self._masked, OPEN: self._open}
        try:
            group, arrays = steps[instruction.action](instruction, held)
        except KeyError as error:
            raise BadMessage(f"It has no {error}", client=self.site) from error
        except ValueError as error:
            raise BadMessage(f"It does not fit this sum: {error}", client=self.site) from error
        return Report(instruction.client, instruction.round, {group: arrays})

    # -- the four steps ------------------------------------------------------------------------------
    def _keys(self, instruction: Instruction, held: Report) -> tuple[str, dict[str, Any]]:
        """New ones for a new session; those of the last are gone then, and with them its masks."""
        name, last = str(instruction.facts["session"]), self._session
        if not SESSION.fullmatch(name):
            raise BadMessage("A session has a name of 32 hexadecimal digits", client=self.site)
        if (instruction.round, name) != (last.round, last.name):
            opened = last.opened if last.round == instruction.round else {}
            self._write(Session(instruction.round, name, secrets.token_hex(32), opened=opened))
        place = Roll(self.federation, instruction.round, name, self.sums.labels, {}).place(self.site)
        return "card", {self.site: Card.unsigned(self._own, self.sums.labels).signed(place, self.key).to_array()}

    def _shares(self, instruction: Instruction, held: Report) -> tuple[str, dict[str, Any]]:
        roll, own = self._roll(instruction), self._own
        needed, count = self._needed(roll), len(roll.cards)
        shares = [b""] * count
        for label in self.sums.labels:
            for secret in (own.own(label), own.pair(label)):
                shares = [before + share for before, share in zip(shares, split(secret, needed, count), strict=True)]
        boxes = {}
        for share, (other, card) in zip(shares, roll.cards.items(), strict=True):
            key = derived(agreed(own.channel, card.channel), *roll.seal(self.site, other))
            boxes[other] = np.frombuffer(sealed(key, share), np.uint8)
        return "shares", boxes

    def _masked(self, instruction: Instruction, held: Report) -> tuple[str, dict[str, Any]]:
        roll, label = self._roll(instruction), self._label(instruction)
        members, seen = self._members(instruction, roll), instruction.arrays.get("seen", {}).get("bits")
        context = roll.context(label, members, b"" if seen is None else bytes_of(seen))
        self._once("masked", label, context)
        words = self.sums.counts_of(held) if label == COVERAGE else self.sums.update_of(held, self._seen(seen, held))
        others = [site for site in members if site != self.site]
        pairwise(words, self.site, self._own.pair(label), roll.pairs(label, others), *context)
        add_mask(words, derived(self._own.own(label), *context, self.site))
        return label, {"words": words}

    def _open(self, instruction: Instruction, held: Report) -> tuple[str, dict[str, Any]]:
        roll, label = self._roll(instruction), self._label(instruction)
        members, arrived = self._members(instruction, roll), names_in(instruction.facts["arrived"])
        context = (*roll.context(label, members, b"")[:-1], str(instruction.facts["seen"]))
        if not set(arrived) <= set(members) or len(arrived) < self._needed(roll):
            what = f"{len(arrived)} sites are left in a sum of {len(roll.cards)}, and {self._needed(roll)} are needed to open it"
            raise BadMessage(what, client=self.site)
        self._once("masked", label, context)
        self._once("opened", label, (*context, ",".join(arrived)))
        shares, start = {}, SHARED * self.sums.labels.index(label)
        for other in members:
            key = derived(agreed(self._own.channel, roll.cards[other].channel), *roll.seal(other, self.site))
            share = unsealed(key, bytes_of(instruction.arrays["shares"][other]))[start : start + SHARED]
            shares[other] = np.frombuffer(share[:SEED] if other in arrived else share[SEED:], np.uint8)
        return "opened", shares

    # -- what it believes -----------------------------------------------------------------------------
    def _roll(self, instruction: Instruction) -> Roll:
        """The sites and keys of the session, each signed by its site; among them its own."""
        name, session = str(instruction.facts["session"]), self._session
        if (instruction.round, name) != (session.round, session.name):
            raise BadMessage("It is of a session that this site has no keys for, or has them no longer", client=self.site)
        roll = Roll.read(self.federation, instruction.round, name, self.sums.labels, instruction.arrays["cards"])
        if roll.digest != self._trusted:
            roll.check(self.fingerprints)
            if self.site not in roll.cards or roll.cards[self.site].keys != Card.unsigned(self._own, self.sums.labels).keys:
                raise BadMessage("This site's own keys are missing or were changed", client=self.site)
            if len(roll.cards) < self.sums.settings.least:
                what = f"{len(roll.cards)} sites are too few for a sum: {self.sums.settings.least} were agreed on (privacy.least)"
                raise BadMessage(what, client=self.site)
            self._trusted = roll.digest
        return roll

    def _needed(self, roll: Roll) -> int:
        return threshold(len(roll.cards), self.sums.settings.least)

    def _label(self, instruction: Instruction) -> str:
        label = str(instruction.facts["label"])
        if label not in self.sums.labels:
            raise BadMessage(f"There is no sum of {label!r}", client=self.site)
        return label

    def _members(self, instruction: Instruction, roll: Roll) -> list[str]:
        members = names_in(instruction.facts["members"])
        if not {self.site} <= set(members) <= set(roll.cards) or len(members) < self._needed(roll):
            what = f"Its sum has {len(members)} sites, and at least {self._needed(roll)} of the session's, this one among them, are needed"
            raise BadMessage(what, client=self.site)
        return members

    def _seen(self, bits: Any, held: Report) -> Bits | None:
        """Entries that may be seen, of an update that was counted before."""
        if not self.sums.parts:
            return None
        if bits is None:
            raise BadMessage("It does not say which entries enough sites have trained", client=self.site)
        entries = sum(array.size for array in held.arrays[UPDATE].values())
        if len(bits) != -(-entries // 8):
            raise BadMessage("It speaks of more or fewer entries than there are", client=self.site)
        return np.unpackbits(bits, count=entries).astype(bool)

    # -- what it remembers ------------------------------------------------------------------------------
    @property
    def _own(self) -> Secrets:
        return Secrets(bytes.fromhex(self._session.secret))

    def _once(self, what: str, label: str, parts: Sequence[str]) -> None:
        """Two answers about one sum could be compared: the first question is the only one."""
        known: dict[str, str] = dict(getattr(self._session, what))
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        if known.setdefault(label, digest) != digest:
            how = "masked" if what == "masked" else "opened"
            raise BadMessage(f"The sum of {label} was {how} for other sites or entries before, and is not {how} twice", client=self.site)
        if known != getattr(self._session, what):
            changed: dict[str, Any] = {what: known}
            self._write(replace(self._session, **changed))

    def _write(self, session: Session) -> None:
        write_file(self.folder / STATE, (json.dumps(asdict(session)) + "\n").encode())
        self._session = session

    def _read(self) -> Session:
        path = self.folder / STATE
        try:
            return Session(**json.loads(read_plain(path))) if path.exists() else Session()
        except (OSError, ValueError, TypeError) as error:
            raise DamagedRun(f"{path} is damaged ({error}). Restore the whole folder from one copy", path=str(path)) from error
