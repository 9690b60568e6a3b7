"""What do secure sums cost? Seconds and bytes of a round for 3, 10 and 50 clients with the supernet of CIFAR-10 (6.4 million entries).

    python benchmarks/secure.py [--clients 3,10,50] [--out benchmarks/results/secure.json]

Nothing is trained and nothing is sent: every client has a random update and the coverage of ten random architectures, and hands its
messages to the server in this process. Seconds are those of one processor, so that what else the machine does is not in them. A client's
are the mean over clients: `masking` is the masked counts and the masked update together, `other` its keys, shares and help to open. The
server's are what is left: adding up and opening. Signatures of messages, a millisecond each, the network and waiting for disks are not in
them. Bytes are those of the messages' content, of one client, against the report and the instruction of a plain round.

Expected before the first run: 1.25 times the bytes up (four bytes and one byte an entry, against four and what compact coverage takes),
and 15 ms of masking for every other client.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric import ec

from fedloom import config
from fedloom.assemble.environment import environment
from fedloom.core.messages import TRAIN, Arrays, Instruction, Report, payload_bytes
from fedloom.core.privacy import PrivacySettings
from fedloom.core.seeds import rng
from fedloom.engine.sums import Sums
from fedloom.federation.server.sums import SecureLink
from fedloom.federation.site.sums import Member
from fedloom.federation.wire.signatures import fingerprint
from fedloom.federation.wire.sums import MASKED
from fedloom.files import write_file
from fedloom.maths.averaging import coverage_equal
from fedloom.spaces.base import ImageShape
from fedloom.supernets.base import make_supernet

RESULT = Path(__file__).parent / "results" / "secure.json"
ARCHIVE = 10  # architectures that a client trains
AGREED = "a benchmark"


@dataclass
class Direct:
    """A link to clients in this process, which measures them."""

    members: dict[str, Member]
    held: Callable[[str], Report]
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    up: dict[str, int] = field(default_factory=dict)
    down: dict[str, int] = field(default_factory=dict)
    given: float = 0.0  # seconds that the updates took, which no real server waits for
    at_once: int = 1

    def clients(self) -> Sequence[str]:
        return list(self.members)

    def fewest(self, asked: int) -> int:
        return asked

    def exchange(self, instructions: Sequence[Instruction]) -> list[Report]:
        return [Report(instruction.client, instruction.round) for instruction in instructions]

    def ask(self, instructions: Sequence[Instruction], needed: int, check: Any, done: Any) -> list[Report]:
        kept = []
        for instruction in instructions:
            name, stage = instruction.client, "masking" if instruction.action == MASKED else "other"
            began = time.process_time()
            report = self.held(name) if instruction.action == MASKED else Report(name, 0)  # which other steps do not read
            asked = time.process_time()
            answer = self.members[name].answer(instruction, report)
            answered = time.process_time()
            self.given += asked - began
            own = self.seconds.setdefault(name, {"masking": 0.0, "other": 0.0})
            own[stage] += answered - asked
            self.up[name] = self.up.get(name, 0) + payload_bytes(answer)
            self.down[name] = self.down.get(name, 0) + payload_bytes(instruction)
            kept.append(check(answer, instruction))
            done(instruction, answer, answered - asked)
        return kept


def measured(clients: int, folder: Path) -> dict[str, Any]:
    settings = config.load("cifar10")
    supernet = make_supernet(settings.space, settings.components[settings.space], ImageShape(3, 32, 10))
    weights: Arrays = {name: np.zeros(shape, np.float32) for name, shape in supernet.shapes.items()}
    names = [f"client-{number:02d}" for number in range(clients)]
    entries = sum(array.size for array in weights.values())

    def held(name: str) -> Report:
        draw = rng("secure", name)
        steps = {supernet.space.sample(draw): 1 for _ in range(ARCHIVE)}
        coverage = {key: (count > 0).numpy() for key, count in supernet.coverage(steps).items()}
        update = {key: draw.standard_normal(array.shape, np.float32) * np.float32(0.01) * coverage[key] for key, array in weights.items()}
        return Report(name, 0, {"update": update, "coverage": coverage}, {"examples": 100})

    sums = Sums(PrivacySettings(secure=True), clients, parts=True)
    keys = {name: ec.generate_private_key(ec.SECP384R1()) for name in names}
    prints = {name: fingerprint(key.public_key()) for name, key in keys.items()}
    direct = Direct({name: Member(name, keys[name], AGREED, prints, sums, folder / name) for name in names}, held)
    link = SecureLink(sums, AGREED, prints, folder / "server", lambda entry: None, print).over(direct)  # type: ignore[arg-type]
    instructions = [Instruction(name, 0, TRAIN, 0, {"weights": weights}) for name in names]
    began = time.process_time()
    (found,) = link.exchange(instructions)
    passed = time.process_time() - began
    at_clients = sum(sum(own.values()) for own in direct.seconds.values())
    plain_up, plain_down = payload_bytes(held(names[0])), payload_bytes(instructions[0])
    record: dict[str, Any] = {
        "entries": entries,
        "client_seconds": {
            stage: round(float(np.mean([own[stage] for own in direct.seconds.values()])), 3) for stage in ("masking", "other")
        },
        "slowest_masking": round(max(own["masking"] for own in direct.seconds.values()), 3),
        "server_seconds": round(passed - at_clients - direct.given, 3),
        "bytes_up": max(direct.up.values()),
        "bytes_down": plain_down + max(direct.down.values()),
        "plain": {"bytes_up": plain_up, "bytes_down": plain_down},
        "times_the_bytes": round((max(direct.up.values()) + plain_down + max(direct.down.values())) / (plain_up + plain_down), 3),
        "times_the_bytes_up": round(max(direct.up.values()) / plain_up, 3),
    }
    if clients <= 10:  # the plain average of more takes more memory than the question is worth
        reports = [held(name) for name in names]
        began = time.process_time()
        plain = coverage_equal([r.arrays["update"] for r in reports], [r.arrays["coverage"] for r in reports], [1.0] * clients)
        record["plain"]["server_seconds"] = round(time.process_time() - began, 3)
        seen = found.arrays["coverage"]
        gaps = [np.abs(found.arrays["update"][name] - plain[name])[seen[name]].max(initial=0) for name in plain]
        record["farthest_from_plain"] = float(max(gaps))
        record["step"] = sums.fixed.step
        record["averaged_entries"] = round(sum(int(own.sum()) for own in seen.values()) / entries, 4)
    return record


def table(record: dict[str, Any]) -> str:
    """As docs/explain/secure.md has it."""
    rows = [
        "| clients | masking, a client | keys, shares, opening, a client | server | bytes up, against plain | all bytes, against plain |",
        "|---|---|---|---|---|---|",
    ]
    for clients, own in record["clients"].items():
        seconds = own["client_seconds"]
        rows.append(
            f"| {clients} | {seconds['masking']:.2f} s | {seconds['other']:.2f} s | {own['server_seconds']:.1f} s "
            f"| {own['bytes_up'] / 1e6:.1f} MB, {own['times_the_bytes_up']:.2f} times | {own['times_the_bytes']:.2f} times |"
        )
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="3,10,50")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {"command": "python benchmarks/secure.py", "load_before": round(os.getloadavg()[0], 1), "clients": {}}
    with tempfile.TemporaryDirectory() as folder:
        measured(3, Path(folder))  # what is loaded and touched for the first time is not counted
    for clients in (int(part) for part in arguments.clients.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            record["clients"][str(clients)] = found = measured(clients, Path(folder))
        found["within"] = found["times_the_bytes"] <= 2 and found["times_the_bytes_up"] <= 2 and found["slowest_masking"] <= 2
        print(clients, json.dumps(found, indent=1), flush=True)
    record["environment"] = environment(torch.device("cpu"))
    write_file(arguments.out, (json.dumps(record, indent=2) + "\n").encode())


if __name__ == "__main__":
    main()
