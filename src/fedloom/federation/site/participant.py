"""A site's part in a federation: instructions checked and answered on its own images, its memory and model kept, what left written down."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedloom.assemble.builder import build
from fedloom.assemble.environment import usable_device
from fedloom.assemble.simulation import run_facts
from fedloom.config import tier_of_each
from fedloom.core.client_site import ClientData, Examples
from fedloom.core.errors import BadMessage, InvalidConfig, UnusableFormat
from fedloom.core.messages import FINISH, TRAIN, Instruction, Report
from fedloom.core.privacy import OF_SUMS
from fedloom.core.result import Ledger, RunResult
from fedloom.data.members import read_member
from fedloom.data.readers import Pool
from fedloom.data.splits import held_out
from fedloom.engine.protection import Protection
from fedloom.engine.run import describe_client
from fedloom.engine.store import Store
from fedloom.engine.sums import sums_of
from fedloom.engine.visit import ClientRecords, Visited, visit
from fedloom.federation.agreement import Agreement, SiteSettings
from fedloom.federation.site.answers import Answers
from fedloom.federation.site.secret import in_private, own_secret
from fedloom.federation.site.statement import Departure, statement
from fedloom.federation.site.sums import Member
from fedloom.federation.wire import sums
from fedloom.federation.wire.messages import finite, from_bytes, to_bytes
from fedloom.federation.wire.signatures import signed
from fedloom.files import write_file
from fedloom.models.export import to_onnx
from fedloom.models.personal import load_model
from fedloom.training.judging import judge_model

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
        private = self.settings.budget.limits()
        built = self._built = build(settings, images, device, clients=self.agreement.sites, private=private)
        self.method = built.method
        if private:
            self._check_choice()
        self.data = own_data(self.settings, self.agreement, device)
        protection = Protection(settings.privacy, settings.participants, lambda report: secrets.token_bytes(32))  # nobody can know it
        self._sums = sums_of(settings.privacy, self.method, settings.participants)
        keep, facts = self.store.append, built.model_facts
        hardware = tier_of_each(settings, self.agreement.sites) if settings.budget.in_tiers else {}
        self._records = ClientRecords(
            *(self.method, self.store, facts, lambda entry: keep([entry]), hardware),
            protection=protection,
            sums=self._sums,
            judge=lambda _, model: judge_model(built.tools, model, self.data),
        )
        if self._sums:
            own = self.settings.name, self.key, self.agreement.digest, self.agreement.fingerprints
            self._member = Member(*own, self._sums, self.store.folder)
        self._final = False
        self.answers = Answers(self.store, self.agreement.digest, self.settings.name)
        self.answers.check()
        self._secret = own_secret(self.store.folder) if self.settings.secret else ""
        self.done = any(entry.final for entry in self.store.read_ledger())  # all that is left is to settle

    def _check_choice(self) -> None:
        """Refuses a budget of this site alone where the server chooses its network, which may be over it."""
        method, run = self.method.at(self.settings.name), self.agreement.settings
        if method.search == "client":
            return
        if not method.one_network:
            what = f"The server of {run.method} chooses this site's networks and does not know [budget] of SITE.toml"
            cure = "Agree on a tier with that budget (budget.* and budget.tiers in FEDERATION.toml), or on a method that searches at sites"
            raise InvalidConfig(f"{what}. {cure}", key="budget")
        method.start(run.seed)  # refuses a network that is over the budget

    def answer(self, data: bytes) -> bytes:
        """The signed report to an instruction, or a refusal that says why. The same instruction again gets the same report again."""
        instruction = from_bytes(Instruction, data, self.settings.message_mb << 20, self.agreement.digest)
        asked, last = hashlib.sha256(data).hexdigest(), self.answers.last
        if instruction.action in sums.ACTIONS:
            return signed(self._part_of_sum(instruction, asked), data, self.key)
        again = last is not None and last.departure.instruction == asked
        if not again:
            self._check(instruction, asked)
        which = "the farewell" if instruction.action == FINISH else f"round {instruction.round + 1}"
        self.say(f"{self.settings.name}: {which}{', which it has answered, again' if again else ''}")
        if again:
            self.answers.repeat()
        else:
            self._compute(instruction, asked)
        self._final = instruction.action == FINISH
        assert self.answers.last is not None
        return signed(self.answers.last.report, data, self.key)

    def _compute(self, instruction: Instruction, asked: str) -> None:
        self.answers.check_memory()
        self.answers.begin(instruction.round, asked)
        own = in_private(instruction, self._secret) if self._secret else instruction
        visited = visit(self.method, own, self.data, *self._records.before(instruction))
        report, entry = self._records.released(instruction, visited)
        held = b""
        if self._sums and instruction.action == TRAIN:  # the update stays here; sums are made of it
            part = self._sums.summand(instruction, report)
            held, report = to_bytes(part, self.agreement.digest) if part else b"", self._sums.single(report)
        plain = to_bytes(report, self.agreement.digest)
        departure = Departure.of(report, instruction, hashlib.sha256(plain).hexdigest(), asked)
        self.answers.keep(departure, entry, plain, self.store.packed_memory(instruction.client, visited.answer.memory), held)

    def _part_of_sum(self, instruction: Instruction, asked: str) -> bytes:
        """Of the round that was answered last, and of no other."""
        name, last = self.settings.name, self.answers.last
        if not self._sums:
            raise BadMessage("Secure sums were not agreed on", client=name)
        if instruction.client != name:
            raise BadMessage(f"It is for {instruction.client}, and this is {name}", client=name)
        if last is None or not last.held or last.departure.round != instruction.round:
            raise BadMessage(f"This site has nothing for a sum of round {instruction.round + 1}", client=name)
        held = from_bytes(Report, last.held, len(last.held), self.agreement.digest)
        report = self._member.answer(instruction, held)
        plain = to_bytes(report, self.agreement.digest)
        self.answers.note(Departure.of(report, instruction, hashlib.sha256(plain).hexdigest(), asked))
        return plain

    def keep(self, state: Any, visited: Visited) -> None:
        """What a newcomer found; nothing leaves."""
        instruction = Instruction(self.settings.name, state.round, FINISH, 0)
        self.store.checkpoint = state.round
        self.store.rewind_ledger(rounds_over=False)  # an earlier try counts no longer
        self._records.keep(instruction, visited)

    def sent(self) -> None:
        self.done = self._final

    def _check(self, instruction: Instruction, asked: str) -> None:
        name, rounds = self.settings.name, self.agreement.settings.rounds
        begun, known = self.answers.begun
        if instruction.client != name:
            raise BadMessage(f"It is for {instruction.client}, and this is {name}", client=name)
        if instruction.round < begun:
            raise BadMessage(f"It is for round {instruction.round + 1}, and round {begun + 1} was begun already", client=name)
        if instruction.round == begun and known not in ("", asked):  # version 0.1.0 did not say which
            raise BadMessage(f"It is not the instruction that round {begun + 1} was begun with, and no round has two", client=name)
        if instruction.round > rounds or (instruction.round == rounds and instruction.action != FINISH):
            raise BadMessage(f"It is for round {instruction.round + 1}, and {rounds} were agreed on", client=name)
        if instruction.action == FINISH and instruction.round < rounds and self.method.uploads:  # local has none, and no rounds
            raise BadMessage(f"It ends the federation after {instruction.round} rounds, and {rounds} were agreed on", client=name)
        finite(instruction)

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
        ledger, answers = Ledger(), self.answers
        ledger.add(self.store.read_ledger())
        final = ledger.final[name]
        uploads = OF_SUMS if self._sums else self.method.uploads
        text = statement(self.agreement.members.name, name, uploads, answers.departures(), answers.refused())
        write_file(folder / "statement.txt", text.encode())
        own = {"site": name, **{key: getattr(final, key) for key in ("architecture", "test_accuracy", "validation_accuracy")}}
        self.store.write_text("result.json", json.dumps({**own, **json.loads(self._result(ledger).to_json())}, indent=2) + "\n")
        accuracy = "unknown" if final.test_accuracy is None else f"{final.test_accuracy:.1%}"
        self.say(f"The personal model of {name} is {model}; on this site's own test images its accuracy is {accuracy}")
        self.say(text.rstrip())
        return folder

    def _result(self, ledger: Ledger) -> RunResult:
        """As of a run with one client, this site. The seconds are those in which it worked."""
        settings, final, data = self.agreement.settings, ledger.final[self.settings.name], self.data
        known = [final] if None not in (final.test_accuracy, final.validation_accuracy) else []
        sizes = {self.settings.name: (len(data.train), len(data.test))}
        return RunResult(
            **run_facts(settings, self.agreement.members.name, self._built, self._built.tools.device),
            seed=settings.seed,
            rounds=final.round,
            finished=True,
            clients=tuple(describe_client(entry, self._built.tools.space, sizes) for entry in known),
            ledger=ledger,
            seconds=round(sum(ledger.stages.values()), 3),
            one_class=(self.settings.name,) if len(data.test.labels.unique()) == 1 else (),
        )


def own_data(settings: SiteSettings, agreement: Agreement, device: torch.device) -> ClientData:
    """This site's images on its device: the same parts as in a simulation of the federation with the same seed."""
    run = agreement.settings
    train, test = read_member(Path(settings.images), agreement.members.classes, run.data.image_size)
    sites = agreement.sites
    number = sites.index(settings.name) if settings.name in sites else len(sites)  # of a newcomer
    fit, select = held_out(run.split, train.labels, run.seed, number)
    if len(fit) < 2 or not len(select) or not len(test):
        what = f"{len(fit)} training, {len(select)} validation and {len(test)} test images"
        cure = "Add images: without a folder test/ four are enough"
        raise InvalidConfig(f"{settings.images} gives {what}; a site needs at least 2, 1 and 1. {cure}", key="images")
    parts = (Pool(train.images[fit], train.labels[fit]), Pool(train.images[select], train.labels[select]), test)
    return ClientData(*(Examples(torch.from_numpy(p.images).to(device), torch.from_numpy(p.labels).to(device)) for p in parts))
