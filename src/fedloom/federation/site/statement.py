"""What left a site: a line for every report, and a plain statement made from nothing but these lines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from fedloom.core.boundary import Manifest
from fedloom.core.errors import DamagedRun
from fedloom.core.messages import Instruction, Report, field_bytes, payload_bytes
from fedloom.core.words import ranges
from fedloom.files import write_file

LOG = "left.jsonl"
CURE = "Restore the whole folder from one copy of its latest moment, or start anew with another `folder` in SITE.toml"
STAYED = (
    "Images, labels, the personal model and the site's memory did not leave. A report could leave only if it held no other",
    f"fields. {LOG} lists each of them with its time, its bytes by field and its SHA-256. Beside reports the connection",
    "carries the site's public key, signatures, the times of its requests and its network address.",
)


@dataclass(frozen=True)
class Departure:
    """A report that was handed to the network, signed. Lines of version 0.1.0 end with ``sha256``."""

    at: str  # UTC
    round: int
    action: str
    fields: dict[str, int]  # bytes of each
    bytes: int
    sha256: str  # of the report as it was sent
    instruction: str = ""  # SHA-256 of what it answers
    memory: str = ""  # SHA-256 of the memory that the answer left behind; empty if the method keeps none
    before: str = ""  # SHA-256 of whose log it is and of all lines before this one

    @classmethod
    def of(cls, report: Report, instruction: Instruction, sha256: str, asked: str = "") -> Departure:
        return cls(now(), instruction.round, instruction.action, field_bytes(report), payload_bytes(report), sha256, asked)

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def mend(log: Path) -> None:
    """Drop a last line that a kill has torn: a report leaves after its line is whole, so that one did not."""
    if not log.exists():
        return
    whole, end, torn = log.read_bytes().rpartition(b"\n")
    if torn:
        write_file(log, whole + end)


def owner_of(federation: str, site: str) -> str:
    """What every digest of a site's log begins with, so that another's log does not fit. federation: its digest."""
    return f"{federation} {site}\n"


def read_log(log: Path, owner: str) -> tuple[list[Departure], list[str]]:
    """All lines, each checked against those before it, and the digest of the log before the first and after each of them.
    owner: by ``owner_of``."""
    departures: list[Departure] = []
    so_far = hashlib.sha256(owner.encode())
    digests = [so_far.hexdigest()]
    try:
        for line in log.read_bytes().splitlines(keepends=True) if log.exists() else ():
            departure = Departure(**json.loads(line))
            chained = departures and departures[-1].before
            if departure.before != digests[-1] and (departure.before or chained):
                raise ValueError(f"line {len(digests)} does not follow from the lines before it, or is of another site or federation")
            so_far.update(line)
            departures.append(departure)
            digests.append(so_far.hexdigest())
    except (OSError, ValueError, TypeError) as error:
        raise DamagedRun(f"{log} cannot be read ({error}); it must not be changed by hand. {CURE}") from error
    return departures, digests


def statement(federation: str, site: str, uploads: Manifest, left: Sequence[Departure], refused: Mapping[str, int]) -> str:
    """In words, for whoever answers for the site's data. refused: why instructions were, and how often."""
    total = sum(line.bytes for line in left)
    rounds = {line.round + 1 for line in left if line.fields}
    text = [f"What left {site} in the federation {federation}", ""]
    if left:
        text.append(f"{len(left)} reports with {total:,} bytes of content left this site, in {len(rounds)} rounds ({ranges(rounds)}).")
        if again := len(left) - len({line.sha256 for line in left}):
            text.append(f"{again} of them had left before: the server asked again, and was sent the same bytes again.")
        for name, upload in uploads.items():
            sent = sum(line.fields.get(name, 0) for line in left)
            text.append(f"  {name}: {sent:,} bytes: {upload.meaning}")
        extra = sorted({name for line in left for name in line.fields} - set(uploads))
        text += [f"  {name}: a field the method does not declare" for name in extra]
    else:
        text.append("Nothing.")
    if refused:
        text += ["", f"{sum(refused.values())} instructions of the server were refused, with no report:"]
        text += [f"  {times} times: {why}" for why, times in refused.items()]
    return "\n".join([*text, *(["", *STAYED] if left else [])]) + "\n"
