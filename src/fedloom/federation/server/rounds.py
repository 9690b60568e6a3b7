"""The server half of a real federation: the same rounds as in a simulation, over a link that is a network."""

from __future__ import annotations

import resource
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, NoReturn

import torch

from fedloom.assemble.builder import build
from fedloom.assemble.simulation import new_run, run_facts, so_far
from fedloom.config import to_toml
from fedloom.core.errors import DamagedRun, InvalidConfig, InvalidData, UnusableFolder
from fedloom.core.method import Method
from fedloom.core.result import RunResult
from fedloom.data.members import classes_of_members
from fedloom.engine.base import Link
from fedloom.engine.newcomers import shared_state
from fedloom.engine.protection import Account
from fedloom.engine.run import Run, Watcher
from fedloom.engine.store import Store, pack_state
from fedloom.engine.sums import sums_of
from fedloom.federation.agreement import Agreement, keep_to
from fedloom.federation.server.link import FlowerLink
from fedloom.federation.server.sums import SecureLink
from fedloom.federation.server.superlink import SuperLink
from fedloom.federation.server.tolerant import Tolerant
from fedloom.federation.wire.flower import need_flower
from fedloom.federation.wire.signatures import fingerprint, public_bytes, public_key
from fedloom.files import waiting_for_room, write_arrays

NEWCOMERS = "newcomers.safetensors"  # in the run folder


@waiting_for_room()
def serve(agreement: Agreement, watcher: Watcher, say: Callable[[str], None]) -> RunResult:
    """Run the rounds, from the first or from the last that was finished, until every site has its personal model."""
    need_flower()
    with suppress(ValueError, OSError):  # not everywhere; the port keeps its connections few anyway
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    settings, own = agreement.settings, agreement.server
    keys = {name: public_key(Path(own.sites) / f"{name}.pub") for name in agreement.sites}
    sites = {name: public_bytes(key) for name, key in keys.items()}
    for one, other in combinations(sites, 2):
        if sites[one] == sites[other]:
            what = f"{one} and {other} have the same key in {own.sites}, so that either could answer for the other"
            raise InvalidConfig(f"{what}. Every site needs a key of its own", key="server.sites")
    for name, agreed in agreement.fingerprints.items():
        if fingerprint(keys[name]) != agreed:
            what = f"{own.sites}/{name}.pub is not the key that was agreed on for {name} (federation.keys)"
            raise InvalidConfig(f"{what}. Put the right one there", key="server.sites")
    folder = Path(own.folder or Path("runs") / agreement.members.name)
    store = Store(folder)
    device = torch.device("cpu")  # it averages
    built = build(settings, agreement.images(serving=True), device, Path(settings.weights), clients=agreement.sites)
    method, initial = built.method, built.method.start(settings.seed)
    account = Account(settings.privacy, settings.participants)
    store.claim()
    try:
        known = (store.folder / "config.toml").exists()
        keep_to(agreement, store.folder, known, "server.folder")
        if not known:
            store.write_text("config.toml", to_toml(settings))
        before, over = so_far(store)
        over = over and {entry.client for entry in store.read_ledger() if entry.final} >= set(agreement.sites)  # or some await their model
        run = Run(
            method=method,
            absorb=Tolerant(method, say, own.round, agreement.claims).absorb,
            initial=initial,
            store=store,
            watcher=watcher,
            rounds=settings.rounds,
            seed=settings.seed,
            facts=run_facts(settings, agreement.members.name, built, device),
            space=built.tools.space,
            images={},
            account=account,
            before=before,
            over=over,
        )
        if over:
            return run.execute(_NoLink(list(sites)))
        with closing(SuperLink(own.address, Path(own.certificate), Path(own.key), sites, own.round.most, say)) as superlink:
            say(f"Listening at {superlink.address} for {', '.join(sites)}")
            result = run.execute(_link(agreement, superlink, keys, method, run, say))
        _prepare_newcomers(store, method, initial, agreement.digest, say)
        return result
    finally:
        store.release()


def _link(
    agreement: Agreement, superlink: SuperLink, keys: dict[str, Any], method: Method[Any], run: Run, say: Callable[[str], None]
) -> Link:
    """To single sites, or to sums over them."""
    settings, digest, round = agreement.settings, agreement.digest, agreement.server.round
    sums = sums_of(settings.privacy, method, settings.participants)
    if sums is None:
        return FlowerLink(superlink, keys, digest, method.uploads, round, run.record, say)
    like = method.supernet_of(run.initial) if method.sums_parts else None
    secure = SecureLink(sums, digest, agreement.fingerprints, run.store.folder, run.record, say, like)
    return secure.over(FlowerLink(superlink, keys, digest, sums.clear, round, secure.collect, say))


def _prepare_newcomers(store: Store, method: Method[Any], initial: Any, digest: str, say: Callable[[str], None]) -> None:
    """What sites need that arrive later, and nothing of those that took part."""
    state, path = store.load_state(initial), store.folder / NEWCOMERS
    if method.uploads and state is not None:
        arrays, facts = pack_state(shared_state(state), state.round)
        write_arrays(path, arrays, {**facts, "federation": digest})
        say(f"{path} is for sites that arrive later: fedloom join {NEWCOMERS} --site SITE.toml")


def rehearsal(agreement: Agreement, images: Path, watcher: Watcher) -> RunResult:
    """The same federation in one process, to see what to expect. With the same images and threads it ends with the same
    numbers as sites without a secret of their own (``secret = false``)."""
    settings = agreement.settings
    folder = Path(agreement.server.folder or Path("runs") / agreement.members.name)
    folder = folder.with_name(f"{folder.name}-rehearsal")
    if (folder / "config.toml").exists():
        over = so_far(Store(folder))[1]
        cure = f"`fedloom report {folder}` shows it" if over else f"`fedloom resume {folder}` goes on with it"
        raise UnusableFolder(f"{folder} holds a rehearsal already. {cure}; remove the folder to rehearse again", folder=str(folder))
    if images.is_dir() and (odd := sorted(set(agreement.members.classes) ^ set(classes_of_members(images)))):
        cure = "The classes of a rehearsal are those of its folders"
        raise InvalidData(f"{images} does not have the classes that were agreed on: {odd[0]!r} differs. {cure}", folder=str(images))
    data = replace(settings.data, folder=str(images))
    return new_run(replace(settings, data=data), folder, watcher)


class _NoLink:
    """No way to reach anybody: a federation that is over needs none."""

    at_once = 1

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def clients(self) -> list[str]:
        return self._names

    def exchange(self, instructions: object) -> NoReturn:
        raise DamagedRun("The federation is over")
