"""A site's rounds: connect to the server, answer until the personal model is there; or join after the rounds, alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedloom.config import to_toml
from fedloom.core.client_site import ClientSite
from fedloom.core.errors import (
    BadMessage,
    ConnectionRefused,
    DamagedRun,
    FedloomError,
    InvalidConfig,
    UnusableFolder,
    one_line,
)
from fedloom.engine.newcomers import check_joinable, shared_state, welcome
from fedloom.engine.store import Store, read_state
from fedloom.federation.agreement import Agreement, SiteSettings, keep_to, read_agreement
from fedloom.federation.site.answers import ANSWER
from fedloom.federation.site.connection import Connection
from fedloom.federation.site.participant import Participant, Say
from fedloom.federation.site.statement import LOG
from fedloom.federation.wire.flower import need_flower
from fedloom.federation.wire.refusals import Refusals
from fedloom.federation.wire.signatures import private_key
from fedloom.files import private, read_arrays, waiting_for_room

PAUSE = 0.5  # seconds before the first of further attempts to reach the server
LONGEST = 30.0  # seconds between two attempts to reach the server
SOON = 0.05  # seconds before the first look for the next instruction


@waiting_for_room()
def attend(settings: SiteSettings, say: Say) -> Path:
    """Answer the federation's rounds until this site has its personal model; the folder where it lies."""
    need_flower()
    agreement = read_agreement(Path(settings.federation))
    if settings.name not in agreement.sites:
        raise InvalidConfig(f"{settings.federation} has no site {settings.name!r}; it has {', '.join(agreement.sites)}", key="name")
    key = private_key(Path(settings.key))
    if not Path(settings.authority).is_file():
        raise InvalidConfig(f"There is no certificate of an authority at {settings.authority}", key="authority")
    with _own_folder(settings, agreement) as store:
        used = any((store.folder / name).exists() for name in ("ledger.jsonl", LOG, ANSWER))
        keep_to(agreement, store.folder, used, "folder")
        store.write_text("config.toml", to_toml(agreement.settings))  # for whoever looks at the folder as at any run
        participant = Participant(settings, agreement, key, store, say)
        refusals = Refusals(say)
        if participant.done:
            say(f"{settings.name} took part in this federation to its end. To take part in another run of it, choose another folder")
        while not participant.done:
            with _connected(settings, key, say) as connection:
                say(f"{settings.name} is connected to {settings.server}")
                try:
                    _answer(connection, participant, settings.poll, refusals)
                except ConnectionRefused as error:
                    refusals.add("connection", f"{error}. Trying again")
                    time.sleep(PAUSE)
        return participant.settle()


@contextmanager
def _own_folder(settings: SiteSettings, agreement: Agreement) -> Iterator[Store]:
    """Where all that this site keeps of the federation lies, for this process and this user alone."""
    store = Store(settings.own_folder(agreement.members.name))
    with private(store.folder):
        store.claim()
        try:
            yield store
        finally:
            store.release()


def _connected(settings: SiteSettings, key: Any, say: Say) -> Connection:
    """Try, with longer and longer pauses; a server that is not the one it should be is final."""
    pause, began, said = PAUSE, time.monotonic(), ""
    while True:
        try:
            return Connection(settings.server, Path(settings.authority), key, settings.message_mb << 20)
        except ConnectionRefused as error:
            waited = time.monotonic() - began
            if error.facts.get("untrusted") or 0 < settings.wait < waited + pause:
                raise
            if str(error) != said:
                say(f"{error}. Trying again")
                said = str(error)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST)


def _answer(connection: Connection, participant: Participant, poll: float, refusals: Refusals) -> None:
    pause = SOON  # rarer and rarer looks: after an answer the next instruction is often not far
    while not participant.done:
        try:
            data = connection.receive()
        except ConnectionRefused:
            raise
        except Exception as error:  # whatever a stranger's bytes make of Flower
            refusals.add("unreadable", f"Refused an instruction: it is not readable ({one_line(error)})")
            participant.answers.refuse("It was not readable")
            connection.reply(None, "the instruction was not readable")
            continue
        if data is None:
            if connection.lost:
                raise ConnectionRefused("The server does not know this connection any more")
            time.sleep(min(pause, poll))
            pause = min(2 * pause, poll)
            continue
        pause = SOON
        try:
            reply = participant.answer(data)
        except (DamagedRun, UnusableFolder) as error:  # whatever the server asks next, this site cannot answer
            connection.reply(None, f"{type(error).__name__}; the site's own log says more")
            raise
        except FedloomError as error:
            refusals.add("instruction", f"Refused an instruction: {error}")
            participant.answers.refuse(str(error))
            # What went wrong with the site's own data is nobody else's business.
            connection.reply(None, str(error) if isinstance(error, BadMessage) else f"{type(error).__name__}; the site's own log says more")
            continue
        connection.reply(reply)
        participant.sent()


def join(settings: SiteSettings, file: Path, rounds: int, say: Say) -> Path:
    """A personal model for a site that arrives after the rounds, from what the server has for newcomers; nothing is sent."""
    agreement = read_agreement(Path(settings.federation))
    _, facts = read_arrays(file)
    if facts.get("federation") != agreement.digest:
        raise BadMessage(f"{file} is of another federation than {settings.federation}, or of other settings of it")
    with _own_folder(settings, agreement) as store:
        if (store.folder / LOG).exists():
            what = f"{store.folder} holds rounds that this site took part in, and a newcomer has none"
            raise InvalidConfig(f"{what}. Take part in the farewell (`fedloom site`), or choose another folder", key="folder")
        participant = Participant(settings, agreement, None, store, say)
        check_joinable(participant.method, agreement.settings.method)
        keep_to(agreement, store.folder, False, "folder")
        store.write_text("config.toml", to_toml(agreement.settings))
        state, _ = read_state(file, shared_state(participant.method.initial(agreement.settings.seed)))
        participant.keep(state, welcome(participant.method, state, ClientSite(settings.name, participant.data), rounds))
        return participant.settle()
