"""The server's part in secure sums: it carries keys and shares from site to site, adds up masked parts, and opens each sum once.

All that it ever holds of a single site is masked. A sum is on disk before it is opened, so that a server that is killed goes on with it: no
site would open another one in that round.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.errors import BadReport
from fedloom.core.messages import FINISH, Arrays, Instruction, Report, field_bytes, field_shapes, payload_bytes
from fedloom.core.privacy import COVERAGE, UPDATE
from fedloom.core.result import LedgerEntry
from fedloom.engine.sums import WEIGHTS, Counted, Sums
from fedloom.federation.server.link import FlowerLink
from fedloom.federation.wire.sums import KEYS, MASKED, OPEN, SHARED, SHARES, Card, Roll, digest_of
from fedloom.files import read_arrays, write_arrays
from fedloom.maths.masks import KEY, NONCE, SEED, add_mask, combined, derived, pairwise, public_of, threshold
from fedloom.maths.sums import Bits, Words

JOURNAL = Path("state") / "sums.safetensors"
SEALED = NONCE + 16  # bytes that a seal adds


class TooFew(Exception):
    """A sum that cannot be opened; the text says why."""


@dataclass(frozen=True)
class Session:
    """Sites that have each other's keys and shares. boxes: receiver -> sender -> shares, sealed."""

    roll: Roll
    members: list[str]
    boxes: Mapping[str, Arrays]


@dataclass(frozen=True)
class Opening:
    """A masked sum, and what its sites must hear to open it."""

    roll: Roll
    label: str
    members: list[str]
    arrived: list[str]
    seen: Any  # (bytes,) packed bits; none in a first sum, or in an only one
    boxes: Mapping[str, Arrays]
    total: Words
    counted: Counted | None = None  # of the first sum, when this is the second

    @property
    def context(self) -> tuple[str, ...]:
        return self.roll.context(self.label, self.members, b"" if self.seen is None else self.seen.tobytes())


@dataclass
class SecureLink:
    """A link that gives the sum of a round's reports for these. record: where a round's ledger entries go, once all of it is known; like:
    arrays that updates are summed as, if not those of the instructions."""

    sums: Sums
    federation: str
    fingerprints: Mapping[str, str]
    folder: Path
    record: Callable[[LedgerEntry], None]
    say: Callable[[str], None]
    like: Arrays | None = None
    entries: dict[str, LedgerEntry] = field(default_factory=dict)

    def over(self, link: FlowerLink) -> SecureLink:
        """link: to the sites, which lets nothing of a report pass but ``sums.clear``, and whose entries this one collects."""
        self.link = link
        return self

    @property
    def at_once(self) -> int:
        return self.link.at_once

    def clients(self) -> Sequence[str]:
        return self.link.clients()

    def collect(self, entry: LedgerEntry) -> None:
        """What the inner link writes down: of a round it is not the whole."""
        if entry.final:
            self.record(entry)
        else:
            self.entries[entry.client] = entry

    def exchange(self, instructions: Sequence[Instruction]) -> list[Report]:
        if any(instruction.action == FINISH for instruction in instructions):
            return self.link.exchange(instructions)
        self.entries = {}
        reports = self.link.exchange(instructions)
        trained = sorted(report.client for report in reports if report.facts or not self.sums.clear)
        round, like = instructions[0].round, self.like or instructions[0].arrays[WEIGHTS]
        singles = reports if self.sums.singles else []
        try:
            return [self._summed(round, trained, like), *singles]
        except TooFew as error:
            self.say(f"round {round + 1} ends without an average: {error}")
            return singles
        finally:
            for entry in self.entries.values():
                self.record(entry)

    # -- a round ------------------------------------------------------------------------------------
    def _summed(self, round: int, trained: list[str], like: Arrays) -> Report:
        """Counts first, where clients train parts, updates second."""
        if len(trained) < self.sums.settings.least:
            raise TooFew(f"{len(trained)} sites have trained, and a sum needs {self.sums.settings.least} (privacy.least)")
        entries = sum(array.size for array in like.values())
        opening, session = self._before(round, trained, entries), None
        if opening is None:
            session = self._session(round, trained)
            opening = self._masked(session, COVERAGE if self.sums.parts else UPDATE, session.members, entries)
            self._save(opening)
        if opening.label == COVERAGE:
            counted = Counted(self._opened(opening), len(opening.arrived))
            opening = self._updates(session, opening.arrived, entries, round, counted)
            self._save(opening)
        total, counts, seen = self._opened(opening), opening.counted, None
        if counts is not None:
            seen = np.unpackbits(opening.seen, count=entries).astype(bool)
        return self.sums.report(round, total, len(opening.arrived), like, counts, seen)

    def _updates(self, session: Session | None, counted_sites: list[str], entries: int, round: int, counted: Counted) -> Opening:
        """The second sum. If sites are lost in it, it is made again among the others, with fewer entries: of what the lost ones trained
        perhaps too few are left, and the sum that they are missing in is never opened."""
        members = counted_sites
        while True:
            if session is None:
                session = self._session(round, members)
                members = session.members
            opening = self._masked(session, UPDATE, members, entries, self.sums.seen(counted, len(members)))
            if opening.arrived == members:
                return replace(opening, counted=counted)
            members, session = opening.arrived, None

    # -- the four steps -----------------------------------------------------------------------------
    def _session(self, round: int, sites: Sequence[str]) -> Session:
        empty = Roll(self.federation, round, secrets.token_hex(16), self.sums.labels, {})
        cards: dict[str, Card] = {}

        def check_card(report: Report, instruction: Instruction) -> Report:
            card = Card.from_array(_only(report, "card", [report.client])[report.client], empty.labels)
            replace(empty, cards={report.client: card}).check(self.fingerprints)
            cards[report.client] = card
            return report

        facts = {"session": empty.session}
        least = self.sums.settings.least
        self._ask([Instruction(site, round, KEYS, 0, facts=facts) for site in sites], least, least, check_card)
        roll = replace(empty, cards=dict(sorted(cards.items())))
        names, length = list(roll.cards), SEALED + SHARED * len(roll.labels)

        def check_shares(report: Report, instruction: Instruction) -> Report:
            for box in _only(report, "shares", names).values():
                _shape(report, box, (length,), np.dtype(np.uint8))
            return report

        asked = [Instruction(site, round, SHARES, 0, {"cards": roll.to_arrays()}, facts) for site in names]
        reports = self._ask(asked, self._needed(roll), len(names), check_shares)
        boxes = {receiver: {report.client: report.arrays["shares"][receiver] for report in reports} for receiver in names}
        return Session(roll, sorted(report.client for report in reports), boxes)

    def _masked(self, session: Session, label: str, members: list[str], entries: int, seen: Bits | None = None) -> Opening:
        roll, (length, word) = session.roll, self.sums.words(entries, label == COVERAGE)
        bits = None if seen is None else np.packbits(seen)
        arrays: dict[str, Arrays] = {"cards": roll.to_arrays()} | ({} if bits is None else {"seen": {"bits": bits}})
        facts = {"session": roll.session, "label": label, "members": ",".join(members)}

        total = np.zeros(length, word)

        def add(report: Report, instruction: Instruction) -> Report:
            """Nothing is kept of a part but its place in the sum."""
            words = _only(report, label, ["words"])["words"]
            _shape(report, words, (length,), word)
            np.add(total, words, out=total)
            return Report(report.client, report.round)

        asked = [Instruction(site, roll.round, MASKED, 0, arrays, facts) for site in members]
        reports = self._ask(asked, self._needed(roll), len(roll.cards), add)
        return Opening(roll, label, members, sorted(report.client for report in reports), bits, session.boxes, total)

    def _opened(self, opening: Opening) -> Words:
        """The sum without its masks."""
        roll, label, arrived = opening.roll, opening.label, opening.arrived
        expected = {site: SEED if site in arrived else KEY for site in opening.members}

        def check(report: Report, instruction: Instruction) -> Report:
            for site, share in _only(report, "opened", opening.members).items():
                _shape(report, share, (expected[site],), np.dtype(np.uint8))
            return report

        needed = self._needed(roll)
        questions = [self._question(opening, site) for site in opening.members]
        reports = self._ask(questions, needed, len(roll.cards), check, wanted=needed)
        total, which = opening.total.copy(), roll.labels.index(label)
        for site in opening.members:
            shares = {roll.number(report.client): report.arrays["opened"][site].tobytes() for report in reports}
            secret, card = combined(shares, needed), roll.cards[site]
            fits = digest_of(secret) == card.digests[which] if site in arrived else public_of(secret) == card.pairs[which]
            if not fits:
                raise TooFew(f"the shares of {site} do not fit, because a site sent wrong ones")
            if site in arrived:
                add_mask(total, derived(secret, *opening.context, site), -1)
            else:  # what it would have added cancels what others added for it
                pairwise(total, site, secret, roll.pairs(label, arrived), *opening.context)
        return total

    def _question(self, opening: Opening, site: str) -> Instruction:
        roll = opening.roll
        facts = {
            "session": roll.session,
            "label": opening.label,
            "members": ",".join(opening.members),
            "arrived": ",".join(opening.arrived),
            "seen": opening.context[-1],
        }
        boxes = {sender: opening.boxes[site][sender] for sender in opening.members}
        return Instruction(site, roll.round, OPEN, 0, {"cards": roll.to_arrays(), "shares": boxes}, facts)

    def _ask(
        self, instructions: Sequence[Instruction], needed: int, of: int, check: Callable[[Report, Instruction], Report], wanted: int = 0
    ) -> list[Report]:
        """Answers, at least ``needed`` of them. wanted: how many are waited for; 0: as many as a round of reports would need."""
        reports = self.link.ask(instructions, wanted or max(needed, self.link.fewest(len(instructions))), check, self._add)
        if len(reports) < needed:
            raise TooFew(f"{len(reports)} sites are left in a sum of {of}, and {needed} are needed to open it")
        return reports

    def _add(self, instruction: Instruction, report: Report, seconds: float) -> None:
        """What a part of a round cost, in the site's line of the ledger."""
        if (entry := self.entries.get(report.client)) is None:
            return
        sent = dict(entry.upload_bytes)
        for name, count in field_bytes(report).items():
            sent[name] = sent.get(name, 0) + count
        self.entries[report.client] = replace(
            entry,
            bytes_up=entry.bytes_up + payload_bytes(report),
            bytes_down=entry.bytes_down + payload_bytes(instruction),
            uploads=tuple(sorted(sent)),
            upload_bytes=sent,
            upload_shapes={**entry.upload_shapes, **field_shapes(report)},
            seconds={**entry.seconds, "sums": entry.seconds.get("sums", 0.0) + seconds},
        )

    def _needed(self, roll: Roll) -> int:
        return threshold(len(roll.cards), self.sums.settings.least)

    # -- what outlives a kill -------------------------------------------------------------------------
    def _save(self, opening: Opening) -> None:
        arrays: dict[str, Any] = {"total": opening.total}
        arrays |= {f"cards/{site}": card for site, card in opening.roll.to_arrays().items()}
        arrays |= {f"boxes/{to}/{sender}": box for to, boxes in opening.boxes.items() for sender, box in boxes.items()}
        arrays |= {} if opening.seen is None else {"seen": opening.seen}
        arrays |= {} if opening.counted is None else {"counts": opening.counted.counts}
        facts = {
            "round": opening.roll.round,
            "federation": self.federation,
            "session": opening.roll.session,
            "label": opening.label,
            "members": opening.members,
            "arrived": opening.arrived,
            "counted": opening.counted.clients if opening.counted else 0,
        }
        write_arrays(self.folder / JOURNAL, arrays, facts)

    def _before(self, round: int, trained: Sequence[str], entries: int) -> Opening | None:
        """The sum of this round that the last process was about to open."""
        path = self.folder / JOURNAL
        if not path.exists():
            return None
        arrays, facts = read_arrays(path)
        if (facts["round"], facts["federation"]) != (round, self.federation):
            return None
        cards = {name.removeprefix("cards/"): array for name, array in arrays.items() if name.startswith("cards/")}
        boxes: dict[str, dict[str, Any]] = {}
        for name in (name for name in arrays if name.startswith("boxes/")):
            _, to, sender = name.split("/")
            boxes.setdefault(to, {})[sender] = arrays[name]
        counted = Counted(arrays["counts"], int(facts["counted"])) if "counts" in arrays else None
        roll = Roll.read(self.federation, round, facts["session"], self.sums.labels, cards)
        members, arrived = list(facts["members"]), list(facts["arrived"])
        return Opening(roll, facts["label"], members, arrived, arrays.get("seen"), boxes, arrays["total"], counted)


def _only(report: Report, group: str, names: Sequence[str]) -> Arrays:
    """The one group of arrays that a part of a sum may carry."""
    found = report.arrays.get(group)
    if found is None or report.facts or len(report.arrays) != 1 or set(found) != set(names):
        raise BadReport(
            f"{report.client}, round {report.round}: it must send {group} of {len(names)}, and nothing else", client=report.client
        )
    return found


def _shape(report: Report, array: Any, shape: tuple[int, ...], word: np.dtype[Any]) -> None:
    if array.shape != shape or array.dtype != word:
        what = f"a part of a sum has shape {array.shape} of {array.dtype}, expected {shape} of {word}"
        raise BadReport(f"{report.client}, round {report.round}: {what}", client=report.client)
