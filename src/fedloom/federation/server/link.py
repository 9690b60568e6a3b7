"""The link to sites over Flower: one message to each site and round, and every report is checked before it counts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedloom.core.boundary import Manifest, release
from fedloom.core.errors import BadMessage, BadReport, ClientFailed, FedloomError, one_line, printable
from fedloom.core.machine import process_memory_mb
from fedloom.core.messages import FINISH, Instruction, Report, field_bytes, field_shapes, payload_bytes
from fedloom.core.result import LedgerEntry
from fedloom.federation.agreement import RoundSettings
from fedloom.federation.server.superlink import Reply
from fedloom.federation.wire.messages import bounded, expected, from_bytes, to_bytes
from fedloom.federation.wire.signatures import opened

GLANCE = 0.05  # seconds between two looks for replies
REFUSALS = 2  # reports that fail a check before their site is not asked again in that round
LOSSES = 3  # times that a site may lose its connection in one round before it is not asked again
AGAIN = 5.0  # seconds before those who failed are asked again, and at least between two lines that say who is waited for
PAUSED = 15.0  # seconds between two looks for replies, after which this process must have been stopped


class Transport(Protocol):
    """What carries messages: a SuperLink."""

    def online(self) -> Mapping[str, str]: ...
    def send(self, site: str, data: bytes) -> str: ...
    def replies(self, waiting: Sequence[str]) -> list[Reply]: ...
    def forget(self, messages: Sequence[str]) -> None: ...


@dataclass
class Asked:
    """A site that has an instruction and has not answered."""

    site: str
    sent: bytes
    since: float
    connection: str  # on another one the site does not know of it


Check = Callable[[Report, Instruction], Report]  # raises what is wrong with a report; what is kept of it
Done = Callable[[Instruction, Report, float], None]  # told of every report that counts, and how many seconds it took


@dataclass
class Round:
    """One exchange as it goes on."""

    instructions: Mapping[str, Instruction]
    needed: int
    check: Check
    done: Done
    once: bool  # who refuses would refuse again
    asked: dict[str, Asked] = field(default_factory=dict)  # message id -> who
    reports: dict[str, Report] = field(default_factory=dict)
    out: set[str] = field(default_factory=set)  # refused, failed or too slow
    refused: Counter[str] = field(default_factory=Counter)  # reports that failed a check, by site
    given_up: set[str] = field(default_factory=set)  # sites that would answer the same again
    losses: Counter[str] = field(default_factory=Counter)  # by site
    quiet_since: float | None = None  # since when no site is at work

    def missing(self) -> list[str]:
        """Sites that could still be asked."""
        busy = {asked.site for asked in self.asked.values()}
        return [site for site in self.instructions if site not in {*self.reports, *self.out, *self.given_up, *busy}]


class FlowerLink:
    """A link to registered sites. A report that fails a check is left out of its round, with one line that says why."""

    def __init__(
        self,
        transport: Transport,
        keys: Mapping[str, Any],
        federation: str,
        uploads: Manifest,
        settings: RoundSettings,
        record: Callable[[LedgerEntry], None],
        say: Callable[[str], None],
    ) -> None:
        self._transport, self._keys, self._federation, self._uploads = transport, keys, federation, uploads
        self._settings, self._record = settings, record
        self._tell = say
        self._names = sorted(keys)
        self.at_once = len(self._names)

    def clients(self) -> Sequence[str]:
        return self._names

    def exchange(self, instructions: Sequence[Instruction]) -> list[Report]:
        by_site = {instruction.client: instruction for instruction in instructions}
        final = any(instruction.action == FINISH for instruction in instructions)
        needed = 0 if final else self.fewest(len(by_site))
        return self._exchanged(Round(by_site, needed, self._released, self._write_down, once=False))

    def fewest(self, asked: int) -> int:
        """Reports without which a round of so many sites does not end."""
        return min(self._settings.minimum or asked, asked)

    def ask(self, instructions: Sequence[Instruction], needed: int, check: Check, done: Done) -> list[Report]:
        """A part of a round: the answers that pass ``check``. It waits for ``needed`` of them, or as long as
        patience lasts: for ever, if every round needs all of its sites (``minimum`` is 0)."""
        return self._exchanged(Round({instruction.client: instruction for instruction in instructions}, needed, check, done, once=True))

    def _exchanged(self, round: Round) -> list[Report]:
        clocks = _clocks()
        while True:
            clocks = self._go_on(round, clocks)
            if self._over(round):
                break
            self._ask(round)
            for reply in self._transport.replies(list(round.asked)):
                if asked := round.asked.pop(reply.message, None):
                    self._take(round, asked, reply)
            self._lose(round)
            time.sleep(GLANCE)
        self._transport.forget(list(round.asked))
        return list(round.reports.values())

    def _go_on(self, round: Round, before: tuple[float, float]) -> tuple[float, float]:
        """If this process was stopped, or its clock set, nobody is late for that, nor gone because their heartbeats are old."""
        stopped, passed = (now - then for now, then in zip(_clocks(), before, strict=True))
        if max(stopped, passed) > PAUSED:
            self._say(f"The server did not run for {max(stopped, passed):.0f} seconds, or its clock was set. {_which(round)} goes on")
            for asked in round.asked.values():
                asked.since += stopped
            if round.quiet_since is not None:
                round.quiet_since += stopped
            time.sleep(AGAIN)  # meanwhile sites say that they are there
        return _clocks()

    def _over(self, round: Round) -> bool:
        if len(round.reports) == len(round.instructions):
            return True
        now = time.monotonic()
        if round.asked:
            round.quiet_since = None
            return False
        if round.quiet_since is None:
            round.quiet_since = now
        missing = round.missing()
        if missing and now - round.quiet_since < self._settings.patience:
            return False
        if len(round.reports) >= round.needed:
            if missing:
                self._say(f"{_which(round)} ends without {', '.join(missing)}: not connected")
            return True
        has = f"{_which(round)} has {len(round.reports)} of the {round.needed} reports it needs"
        if not missing and not round.out:
            self._say(f"{has} and ends without {_names(round.given_up)}, who would answer the same again")
            return True
        if round.once and self._settings.minimum:  # the round may do without them
            self._say(f"{has} and ends without {_names({*missing, *round.out})}")
            return True
        if not missing:  # those that were refused or failed are asked again
            self._say(f"{has}; asking {_names(round.out)} again")
            time.sleep(AGAIN)
            round.out.clear()
            round.losses.clear()
        elif now - round.quiet_since >= AGAIN:
            self._say(f"{has}; waiting for {_names(missing)}")
        else:
            return False
        round.quiet_since = None
        return False

    def _ask(self, round: Round) -> None:
        online = self._transport.online()
        for site in round.missing():
            if site in online:
                sent = to_bytes(round.instructions[site], self._federation)
                if message := self._transport.send(site, sent):
                    round.asked[message] = Asked(site, sent, time.monotonic(), online[site])

    def _take(self, round: Round, asked: Asked, reply: Reply) -> None:
        instruction = round.instructions[asked.site]
        if reply.lost:
            self._lost(round, asked.site)
            return
        try:
            report = self._opened(reply, asked, instruction)
            kept = round.check(report, instruction)
        except Exception as error:  # whatever a stranger's bytes make of it: the others go on
            why = error if isinstance(error, FedloomError) else f"it is not readable ({one_line(error)})"
            self._say(f"{asked.site}, {_which(round)}: left out: {why}")
            round.refused[asked.site] += not reply.error
            failed = reply.error.startswith(ClientFailed.__name__) or (round.once and reply.error)
            same_again = failed or round.refused[asked.site] >= REFUSALS
            (round.given_up if same_again else round.out).add(asked.site)
            return
        round.reports[asked.site] = kept
        round.done(instruction, report, time.monotonic() - asked.since)

    def _opened(self, reply: Reply, asked: Asked, instruction: Instruction) -> Report:
        """Whose, and for what: before anything else, and before anything is computed with it."""
        if reply.site != asked.site:
            raise BadMessage(f"{reply.site or 'A stranger'} answered in its name", client=asked.site)
        if reply.error:
            raise BadMessage(reply.error, client=asked.site)
        plain = opened(reply.data, asked.sent, self._keys[asked.site], asked.site)
        return expected(from_bytes(Report, plain, self._settings.most, self._federation), instruction, asked.site)

    def _released(self, report: Report, instruction: Instruction) -> Report:
        """Of which shape, and how large."""
        released = release(report, instruction, self._uploads)
        if instruction.action == FINISH and (report.arrays or report.facts):
            raise BadReport("The final participation must send nothing", client=report.client)
        return bounded(released.report, instruction, self._uploads, self._settings.norm)

    def _lose(self, round: Round) -> None:
        """Give up those that take too long or are gone; who is gone may come back."""
        online, now = self._transport.online(), time.monotonic()
        for message, asked in list(round.asked.items()):
            late = now - asked.since > self._settings.timeout
            if not late and online.get(asked.site) == asked.connection:
                continue
            del round.asked[message]
            self._transport.forget([message])
            if late:
                self._say(f"{asked.site}, {_which(round)}: left out: no answer in {self._settings.timeout:g} seconds")
                round.out.add(asked.site)
            else:
                self._lost(round, asked.site)

    def _say(self, text: str) -> None:
        self._tell(printable(text))  # a site's words are part of some lines

    def _lost(self, round: Round, site: str) -> None:
        round.losses[site] += 1
        often = round.losses[site] >= LOSSES
        self._say(f"{site}, {_which(round)}: the connection is lost" + (f", {LOSSES} times: left out" if often else ""))
        if often:
            round.out.add(site)

    def _write_down(self, instruction: Instruction, report: Report, seconds: float) -> None:
        """What the server can know of a participation: nothing of architectures or accuracies."""
        entry = LedgerEntry(
            client=instruction.client,
            round=instruction.round,
            final=instruction.action == FINISH,
            bytes_down=payload_bytes(instruction),
            bytes_up=payload_bytes(report),
            uploads=tuple(sorted({*report.arrays, *report.facts})),
            seconds={"exchange": seconds},
            architecture="",
            validation_accuracy=None,
            test_accuracy=None,
            trained_macs=0,
            evaluated_architectures=0,
            peak_memory_mb=0.0,
            process_memory_mb=process_memory_mb(),
            upload_bytes=field_bytes(report),
            upload_shapes=field_shapes(report),
        )
        self._record(entry)


def _clocks() -> tuple[float, float]:
    """One for time limits, which nobody sets but which may rest while the machine does, and the one that Flower goes by."""
    return time.monotonic(), time.time()


def _which(round: Round) -> str:
    instruction = next(iter(round.instructions.values()))
    return "the farewell" if instruction.action == FINISH else f"round {instruction.round + 1}"


def _names(sites: Sequence[str] | set[str]) -> str:
    return ", ".join(sorted(sites))
