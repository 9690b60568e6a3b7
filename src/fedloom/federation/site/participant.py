"""A site's part in a federation: instructions checked and answered on its own images, its memory and model kept, what left written down."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedloom.assemble.builder import build
from fedloom.assemble.environment import usable_device
from fedloom.core.client_site import ClientData, Examples
from fedloom.core.errors import BadMessage, InvalidConfig, UnusableFormat
from fedloom.core.messages import FINISH, Instruction
from fedloom.core.result import LedgerEntry
from fedloom.data.members import read_member
from fedloom.data.readers import Pool
from fedloom.data.splits import held_out
from fedloom.engine.store import Store
from fedloom.engine.visit import ClientRecords, Visited, visit
from fedloom.federation.agreement import Agreement, SiteSettings
from fedloom.federation.site.statement import LOG, Departure, mend, statement
from fedloom.federation.wire.messages import finite, from_bytes, to_bytes
from fedloom.federation.wire.signatures import signed
from fedloom.files import append_lines, write_file
from fedloom.models.export import to_onnx
from fedloom.models.personal import load_model

Say = Callable[[str], None]


@dataclass
class Participant:
    """Where instructions are checked and answered. All that is kept is on disk before a report leaves."""

    settings: SiteSettings
    agreement: Agreement
    key: Any
    store: Store
    say: Say
    done: bool = False

    def __post_init__(self) -> None:
        if self.settings.threads:
            torch.set_num_threads(self.settings.threads)
        device = usable_device(self.settings.device)
        settings, images = self.agreement.settings, self.agreement.images()
        built = build(settings, images, device)
        self.method = built.method
        self.data = own_data(self.settings, self.agreement, device)
        self._records = ClientRecords(self.method, self.store, built.model_facts, self._record)
        self._entries: list[LedgerEntry] = []
        self._final = False
        known = list(self.store.read_ledger())
        self._last = max((entry.round for entry in known), default=-1)
        self.done = any(entry.final for entry in known)  # all that is left is to settle
        mend(self.store.folder / LOG)

    def answer(self, data: bytes) -> bytes:
        """The signed report to an instruction, or a refusal that says why."""
        instruction = from_bytes(Instruction, data, self.settings.message_mb << 20, self.agreement.digest)
        self._check(instruction)
        self.say(f"{self.settings.name}: {'the farewell' if instruction.action == FINISH else f'round {instruction.round + 1}'}")
        visited = visit(self.method, instruction, self.data, *self._records.before(instruction))
        # Whoever asks for this round has finished all before it, and may ask for it again: its memories stay, those before them need not.
        self.store.checkpoint = instruction.round
        self.store.rewind_ledger(rounds_over=instruction.action == FINISH)
        self._entries.clear()
        report = self._records.keep(instruction, visited)
        assert report is not None  # only simulated hardware is late
        self.store.append(self._entries)
        self._last = instruction.round
        plain = to_bytes(report, self.agreement.digest)
        departure = Departure.of(report, instruction, hashlib.sha256(plain).hexdigest())
        append_lines(self.store.folder / LOG, [departure.to_json()])  # before it does
        self._final = instruction.action == FINISH
        return signed(plain, data, self.key)

    def keep(self, state: Any, visited: Visited) -> None:
        """What a newcomer found; nothing leaves."""
        instruction = Instruction(self.settings.name, state.round, FINISH, 0)
        self.store.checkpoint = state.round
        self.store.rewind_ledger(rounds_over=False)  # an earlier try counts no longer
        self._records.keep(instruction, visited)
        self.store.append(self._entries)

    def sent(self) -> None:
        self.done = self._final

    def _check(self, instruction: Instruction) -> None:
        name, rounds = self.settings.name, self.agreement.settings.rounds
        if instruction.client != name:
            raise BadMessage(f"It is for {instruction.client}, and this is {name}", client=name)
        if instruction.round < self._last:
            raise BadMessage(f"It is for round {instruction.round + 1}, and round {self._last + 1} was answered already", client=name)
        if instruction.round > rounds or (instruction.round == rounds and instruction.action != FINISH):
            raise BadMessage(f"It is for round {instruction.round + 1}, and {rounds} were agreed on", client=name)
        finite(instruction)

    def _record(self, entry: LedgerEntry) -> None:
        self._entries.append(entry)

    def settle(self) -> Path:
        """The personal model for use elsewhere, its accuracy, and what left this site, in words."""
        folder, name = self.store.folder, self.settings.name
        model = self.store.model_path(name)
        if self.settings.onnx:
            try:
                to_onnx(folder / "model.onnx", *load_model(model))
                model = folder / "model.onnx"
            except UnusableFormat as error:
                self.say(f"The personal model is not exported to ONNX: {error}")
        final = [entry for entry in self.store.read_ledger() if entry.final][-1]
        text = statement(self.agreement.members.name, name, self.method.uploads, folder / LOG)
        write_file(folder / "statement.txt", text.encode())
        result = {"site": name, **{key: getattr(final, key) for key in ("architecture", "test_accuracy", "validation_accuracy")}}
        self.store.write_text("result.json", json.dumps(result, indent=2) + "\n")
        accuracy = "unknown" if final.test_accuracy is None else f"{final.test_accuracy:.1%}"
        self.say(f"The personal model of {name} is {model}; on this site's own test images its accuracy is {accuracy}")
        self.say(text.rstrip())
        return folder


def own_data(settings: SiteSettings, agreement: Agreement, device: torch.device) -> ClientData:
    """This site's images on its device: the same parts as in a simulation of the federation with the same seed."""
    run = agreement.settings
    train, test = read_member(Path(settings.images), agreement.members.classes, run.data.image_size)
    sites = agreement.sites
    number = sites.index(settings.name) if settings.name in sites else len(sites)  # of a newcomer
    fit, select = held_out(run.split, train.labels, run.seed, number)
    if len(fit) < 2 or not len(select) or not len(test):
        what = f"{len(fit)} training, {len(select)} validation and {len(test)} test images"
        raise InvalidConfig(f"{settings.images} gives {what}; a site needs at least 2, 1 and 1", key="images")
    parts = (Pool(train.images[fit], train.labels[fit]), Pool(train.images[select], train.labels[select]), test)
    return ClientData(*(Examples(torch.from_numpy(p.images).to(device), torch.from_numpy(p.labels).to(device)) for p in parts))
