"""What a site has answered, on its disk: the last answer, the log of what left, the ledger and the memory, which must fit each other.

The last answer is written first, whole and in one step; then memory, ledger and log are brought up to it. A site that is killed in between
does this when it starts again. So whatever does not fit then was lost, mixed up or put back from an older copy, and is refused: a site
that went on from another memory would spoil its model, and one that forgot what it answered could be made to answer again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from fedloom.core.errors import DamagedRun, printable
from fedloom.core.result import LedgerEntry
from fedloom.engine.store import Store
from fedloom.federation.site.statement import CURE, LOG, Departure, mend, now, owner_of, read_log
from fedloom.federation.wire import sums
from fedloom.files import append_lines, read_arrays, write_arrays, write_file

ANSWER = "state/answer.safetensors"
BEGUN = "state/begun.json"
REFUSED = "refused.json"
REASONS = 20  # different ones that are counted each by itself: a hostile server may think of any number


@dataclass(frozen=True)
class Answered:
    """An answer and what it left behind. The report is kept as it was sent: computed again it might differ, by a clock or on a GPU,
    and a server that is sent several reports about one round can learn more from their differences than from one."""

    departure: Departure
    entry: LedgerEntry
    report: bytes
    memory: bytes  # the file of this round; empty if the method keeps none
    held: bytes = b""  # what the method would have sent, where secure sums are made of it


class Answers:
    def __init__(self, store: Store, federation: str, site: str) -> None:
        """federation: its digest."""
        self._store, self._site, self._owner = store, site, owner_of(federation, site)
        self._log, self._answer = store.folder / LOG, store.folder / ANSWER
        # Beside the folder, so that it notices when the folder is lost or put back as a whole. No site's name begins with a dot.
        self._newest = store.folder.with_name(f".{store.folder.name}.newest.json")
        self.last: Answered | None = None  # nothing in a folder of version 0.1.0
        self.begun = (-1, "")  # the newest round, and the instruction that this site began to work on in it

    def departures(self) -> list[Departure]:
        return read_log(self._log, self._owner)[0]

    # -- one more ------------------------------------------------------------------------
    def begin(self, round: int, asked: str) -> None:
        """From here on the round has this instruction and no other, even if it fails: whether one fails says something of the data, too."""
        self._store.write_text(BEGUN, json.dumps({"round": round, "instruction": asked}) + "\n")
        self.begun = (round, asked)

    def keep(self, departure: Departure, entry: LedgerEntry, report: bytes, memory: bytes, held: bytes = b"") -> None:
        """Before the report leaves."""
        self._commit(Answered(replace(departure, memory=_sha256(memory) if memory else ""), entry, report, memory, held))

    def note(self, departure: Departure) -> None:
        """Before a part of a sum leaves: a line of the log and nothing else."""
        departure = replace(departure, before=read_log(self._log, self._owner)[1][-1])
        append_lines(self._log, [departure.to_json()])
        self._remember_newest(departure.round)

    def repeat(self) -> None:
        """Before the last report leaves once more."""
        assert self.last is not None
        self._commit(replace(self.last, departure=replace(self.last.departure, at=now())))

    def _commit(self, answered: Answered) -> None:
        departure = replace(answered.departure, before=read_log(self._log, self._owner)[1][-1])
        answered = replace(answered, departure=departure)
        parts = {"report": answered.report, "memory": answered.memory, "held": answered.held}
        arrays = {name: np.frombuffer(part, np.uint8) for name, part in parts.items() if part or name != "held"}
        write_arrays(self._answer, arrays, {"departure": asdict(departure), "entry": answered.entry.to_json()})
        self._catch_up(answered)

    def _catch_up(self, answered: Answered) -> None:
        """The line of the log comes last: where it is, all the rest is."""
        store, departure = self._store, answered.departure
        store.checkpoint = departure.round
        if answered.memory:
            store.write_memory(self._site, departure.round, answered.memory)
        store.rewind_ledger(rounds_over=False)
        store.append([answered.entry])
        append_lines(self._log, [departure.to_json()])
        self._remember_newest(departure.round)
        self.last = answered

    def _remember_newest(self, round: int) -> None:
        newest = {"log": read_log(self._log, self._owner)[1][-1], "round": round}
        write_file(self._newest, (json.dumps(newest) + "\n").encode())

    # -- at the start ----------------------------------------------------------------------
    def check(self) -> None:
        """Finish what a kill has broken off; refuse what no kill can have left."""
        mend(self._log)
        departures, digests = read_log(self._log, self._owner)
        self._check_newest(digests)
        self.last = answered = self._read()
        if not answered and departures and departures[-1].before:
            raise self._unfit(f"{ANSWER} is missing")
        if answered and answered.departure not in [line for line in departures if line.action not in sums.ACTIONS][-1:]:
            if answered.departure.before != digests[-1]:
                raise self._unfit(f"{ANSWER} and {LOG} are not of the same moment")
            self._catch_up(answered)
        self._check_ledger()
        self.check_memory()
        self.begun = self._read_begun()

    def _read(self) -> Answered | None:
        if not self._answer.exists():
            return None
        try:
            arrays, facts = read_arrays(self._answer)
            entry = LedgerEntry.from_json(facts["entry"])
            held = arrays["held"].tobytes() if "held" in arrays else b""
            return Answered(Departure(**facts["departure"]), entry, arrays["report"].tobytes(), arrays["memory"].tobytes(), held)
        except (DamagedRun, KeyError, TypeError, ValueError) as error:
            raise self._unfit(f"{ANSWER} is damaged") from error

    def _read_begun(self) -> tuple[int, str]:
        newest = max((entry.round for entry in self._store.read_ledger()), default=-1)
        answered = newest, self.last.departure.instruction if self.last else ""
        path = self._store.folder / BEGUN
        try:
            begun = json.loads(path.read_text() if path.exists() else '{"round": -1, "instruction": ""}')
            return (int(begun["round"]), str(begun["instruction"])) if begun["round"] > newest else answered
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._unfit(f"{BEGUN} is damaged") from error

    def _check_newest(self, digests: list[str]) -> None:
        if not self._newest.exists():  # a folder that was moved by itself, or of version 0.1.0
            return
        try:
            newest = json.loads(self._newest.read_text())
            digest, round = str(newest["log"]), int(newest["round"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._unfit(f"{self._newest} is damaged") from error
        if digest not in digests:
            raise self._unfit(f"its log was another when this site answered round {round + 1}: the folder was lost, or is an older copy")

    def _check_ledger(self) -> None:
        """Version 0.1.0 wrote it before the log, so that a kill could leave one line more."""
        departures, rounds = self.departures(), [entry.round for entry in self._store.read_ledger()]
        last = departures[-1].round if departures else -1
        if sum(round > last for round in rounds) > (self.last is None):
            raise self._unfit(f"ledger.jsonl has round {max(rounds) + 1}, and {LOG} ends before it: its end is missing")
        if departures and last not in rounds:
            raise self._unfit(f"{LOG} has round {last + 1}, and ledger.jsonl has not")
        if not rounds and self._store.memories(self._site):
            raise self._unfit(f"it has a memory, and neither ledger.jsonl nor {LOG} says whose")

    def check_memory(self) -> None:
        """It is the one that the last answer left behind. There is nothing to compare it with before the first answer that was kept."""
        if self.last is None:
            return
        departure, found = self.last.departure, self._store.memories(self._site)
        newest = max(found, default=None)
        if newest != (departure.round if departure.memory else None):
            has = "no memory" if newest is None else f"a memory of round {newest + 1}"
            raise self._unfit(f"it has {has}, and this site answered round {departure.round + 1} last")
        if newest is not None and _sha256(_bytes(found[newest])) != departure.memory:
            raise self._unfit(f"{found[newest].name} is damaged or another's: it is not what the answer to round {newest + 1} left behind")

    def _unfit(self, what: str) -> DamagedRun:
        return DamagedRun(f"{self._store.folder} cannot go on: {what}. {CURE}", path=str(self._store.folder))

    # -- what was not answered -----------------------------------------------------------------
    def refused(self) -> dict[str, int]:
        """Why, and how often."""
        try:
            path = self._store.folder / REFUSED
            return {str(why): int(times) for why, times in json.loads(path.read_text()).items()} if path.exists() else {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise self._unfit(f"{REFUSED} is damaged") from error

    def refuse(self, why: str) -> None:
        counts, why = self.refused(), printable(why, 200)
        if why not in counts and len(counts) >= REASONS:
            why = "for other reasons"
        self._store.write_text(REFUSED, json.dumps({**counts, why: counts.get(why, 0) + 1}, indent=2) + "\n")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DamagedRun(f"{path} cannot be read ({error.strerror})", path=str(path)) from error
