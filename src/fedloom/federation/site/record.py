"""What a site knows of what left it, for `fedloom audit`: its log, its ledger and what was agreed on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedloom.assemble.builder import build
from fedloom.core.boundary import Manifest
from fedloom.core.errors import DamagedRun, InvalidConfig
from fedloom.core.privacy import UPDATE, PrivacySettings
from fedloom.core.result import LedgerEntry
from fedloom.engine.protection import Account
from fedloom.engine.store import Store
from fedloom.federation.agreement import SiteSettings, read_agreement
from fedloom.federation.site.statement import LOG, Departure, owner_of, read_log


@dataclass(frozen=True)
class Record:
    """What a site knows of what left it."""

    site: str
    federation: str
    uploads: Manifest
    privacy: PrivacySettings
    spent: Mapping[str, Any]  # epsilon and delta
    entries: Sequence[LedgerEntry]
    remarks: Sequence[str]


def own_record(settings: SiteSettings) -> Record:
    """Read, not changed. Refuses a log whose lines do not follow from each other."""
    agreement = read_agreement(Path(settings.federation))
    run, name, store = agreement.settings, settings.name, Store(settings.own_folder(agreement.members.name))
    left, _ = read_log(store.folder / LOG, owner_of(agreement.digest, name))
    if not left:
        raise DamagedRun(
            f"{store.folder} has no {LOG}: this site has not taken part yet, or its folder is elsewhere", path=str(store.folder)
        )
    entries = [_as_logged(entry, left) for entry in store.read_ledger()]
    remarks = [f"{store.folder / LOG} is whole: each of its {len(left)} lines follows from those before it"]
    if again := len(left) - len({line.sha256 for line in left}):
        remarks.append(f"{again} reports left again: the server asked again, and was sent the same bytes")
    try:
        spent = Account(run.privacy, run.participants).at_site(sum(UPDATE in entry.uploads for entry in entries))
    except InvalidConfig as error:  # a site takes part without an accountant
        spent, remarks = {}, [*remarks, str(error)]
    method = build(run, agreement.images(), torch.device("cpu"), clients=agreement.sites).method
    return Record(name, agreement.members.name, method.uploads, run.privacy, spent, entries, remarks)


def _as_logged(entry: LedgerEntry, left: Sequence[Departure]) -> LedgerEntry:
    """A participation with the bytes that the log has: of all parts of its round, each as often as it left."""
    sent: Counter[str] = Counter()
    for line in left:
        if line.round == entry.round and not entry.final:
            sent.update(line.fields)
    known = {name: entry.upload_shapes.get(name, "keys or shares") for name in sent}
    return replace(entry, uploads=tuple(sorted(sent)), upload_bytes=dict(sent), upload_shapes=known, bytes_up=sum(sent.values()))
