"""What left a site: a line for every report, and a plain statement made from nothing but these lines."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from fedloom.core.boundary import Manifest
from fedloom.core.errors import DamagedRun
from fedloom.core.messages import Instruction, Report, field_bytes, payload_bytes
from fedloom.files import write_file

LOG = "left.jsonl"


@dataclass(frozen=True)
class Departure:
    """A report that was handed to the network, signed."""

    at: str  # UTC
    round: int
    action: str
    fields: dict[str, int]  # bytes of each
    bytes: int
    sha256: str  # of the report as it was sent

    @classmethod
    def of(cls, report: Report, instruction: Instruction, sha256: str) -> Departure:
        at = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(at, instruction.round, instruction.action, field_bytes(report), payload_bytes(report), sha256)

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))


def mend(log: Path) -> None:
    """Drop a last line that a kill has torn: a report leaves after its line is whole, so that one did not."""
    if not log.exists():
        return
    whole, end, torn = log.read_bytes().rpartition(b"\n")
    if torn:
        write_file(log, whole + end)


def statement(federation: str, site: str, uploads: Manifest, log: Path) -> str:
    """In words, for whoever answers for the site's data."""
    lines = []
    try:
        for line in log.read_text().splitlines() if log.exists() else ():
            lines.append(Departure(**json.loads(line)))
    except (OSError, ValueError, TypeError) as error:
        raise DamagedRun(f"{log} cannot be read ({error}); it must not be changed by hand") from error
    total = sum(line.bytes for line in lines)
    rounds = sorted({line.round + 1 for line in lines if line.fields})
    text = [f"What left {site} in the federation {federation}", ""]
    if not lines:
        return "\n".join([*text, "Nothing."]) + "\n"
    text.append(f"{len(lines)} reports with {total:,} bytes of content left this site, in {len(rounds)} rounds ({_ranges(rounds)}).")
    for name, upload in uploads.items():
        sent = sum(line.fields.get(name, 0) for line in lines)
        text.append(f"  {name}: {sent:,} bytes: {upload.meaning}")
    extra = sorted({name for line in lines for name in line.fields} - set(uploads))
    text += [f"  {name}: a field the method does not declare" for name in extra]
    text += [
        "",
        "Images, labels, the personal model and the site's memory did not leave. A report could leave only if it held no other",
        f"fields. {log.name} lists each of them with its time, its bytes by field and its SHA-256. Beside reports the connection",
        "carries the site's public key, signatures, the times of its requests and its network address.",
    ]
    return "\n".join(text) + "\n"


def _ranges(numbers: list[int]) -> str:
    """1-3, 5"""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts) or "none"
