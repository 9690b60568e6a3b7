"""Run folders made up for reports: as large, as small or as odd as a test wants, in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from fedloom import config
from fedloom.assemble.simulation import _fingerprint
from fedloom.core.result import ClientResult, Ledger, LedgerEntry, RunResult
from fedloom.data.readers import read
from fedloom.data.splits import make_split
from fedloom.engine.store import Store
from fedloom.spaces.base import ImageShape
from fedloom.supernets.base import make_supernet

ENVIRONMENT = {"fedloom": "0.1.0", "python": "3.12", "torch": "2.11", "numpy": "2", "commit": "0123456789ab", "device": "cpu", "threads": 1}
STAGES = {"perfedsde": ("generate", "rescore", "surrogate", "train", "score", "test")}


def made_up_run(
    folder: Path,
    method: str = "perfedsde",
    clients: int = 4,
    rounds: int = 3,
    participants: int = 2,
    accuracies: Sequence[float] = (),
    names: Sequence[str] = (),
    finished: bool = True,
    seed: int = 0,
    overrides: Sequence[str] = (),
    environment: dict[str, Any] = ENVIRONMENT,
    final_notes: Sequence[Mapping[str, float]] = (),
) -> Path:
    """A folder as a run leaves it, without models: config.toml, result.json, ledger.jsonl and the split.

    final_notes: of each client's last entry.
    """
    size = [f"clients={clients}", f"participants={participants}", f"rounds={rounds}", f"seed={seed}", f"method={method}"]
    plain = ["split.rule=plato", "split.size=40", "split.test_size=20"]
    settings = config.load("quickstart", [*size, *plain, *overrides])
    dataset = read(settings.data)
    split = make_split(settings.split, dataset.train.labels, dataset.test.labels, clients, seed)
    store, draw = Store(folder), np.random.default_rng(seed)
    store.save_split(split.to_arrays(), _fingerprint(dataset))
    store.write_text("config.toml", config.to_toml(settings))
    _, channels, side, _ = dataset.train.images.shape
    space = make_supernet(settings.space, settings.components[settings.space], ImageShape(channels, side, 10)).space
    names = names or [f"client-{number:03d}" for number in range(clients)]
    own = [(space.sample(draw) if method == "perfedsde" else space.named["medium"]).id for _ in names]
    last = [dict(notes) for notes in final_notes] or [{} for _ in names]
    ends = list(accuracies) or (0.6 + 0.4 * draw.random(clients)).tolist()

    def entry(number: int, round: int, final: bool) -> LedgerEntry:
        sent = {} if final or method == "local" else {"update": 1000, "coverage": 200, "examples": 16}
        sent = {name: size for name, size in sent.items() if method == "perfedsde" or name != "coverage"}
        accuracy = ends[number] if final else ends[number] * (1 - 0.5 / (round + 1))
        notes = {"best_score": accuracy, "median_score": 0.9 * accuracy, "unique_share": 0.75, "known_share": 0.125, "covered_share": 0.5}
        if round % 2:
            notes["rbf_rank_correlation"] = float(draw.uniform(-1, 1))
        return LedgerEntry(
            client=names[number],
            round=round,
            final=final,
            bytes_down=1500,
            bytes_up=sum(sent.values()),
            uploads=tuple(sorted(sent)),
            seconds={stage: 0.5 for stage in STAGES.get(method, ("train", "test"))},
            architecture=own[number],
            validation_accuracy=accuracy,
            test_accuracy=accuracy,
            trained_macs=10**6,
            evaluated_architectures=8 if method == "perfedsde" else 0,
            peak_memory_mb=3.0,
            process_memory_mb=300.0,
            notes=last[number] if final else notes if method == "perfedsde" else {},
            upload_bytes=sent,
            upload_shapes={name: "1 number" if name == "examples" else "250 values (float32) in 2 arrays" for name in sent},
        )

    entries = [entry(number, round, False) for round in range(rounds) for number in draw.permutation(clients)[:participants].tolist()]
    entries = [] if method == "local" else entries
    entries += [entry(number, rounds, True) for number in range(clients)] if finished else []
    store.append(entries)
    ledger = Ledger()
    ledger.add(entries)
    results = []
    for number in range(clients if finished else 0):
        cost = space.cost(space.find(own[number], draw))
        images = [len(split.part(part, number)) for part in ("train", "test")]
        results.append(ClientResult(names[number], ends[number], ends[number], own[number], cost.parameters, cost.macs, *images))
    done = 0 if method == "local" else rounds
    result = RunResult(method, settings.space, "digits", settings.protocol, seed, done, finished, tuple(results), ledger, 12.5, environment)
    store.write_text("result.json", result.to_json() + "\n")
    return folder


class Outline(HTMLParser):
    """Tags in balance, ids, words by section."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.section = ""
        self.words: dict[str, str] = {}  # by section; "" is outside of them
        self.tags: set[str] = set()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(name)
        own = dict(attributes)
        if "id" in own:
            self.ids.append(str(own["id"]))
        if name == "section":
            self.section = str(own["id"])
        if name not in ("meta", "link"):
            self.open.append(name)

    def handle_startendtag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(name, attributes)
        self.handle_endtag(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name
        if name == "section":
            self.section = ""

    def handle_data(self, data: str) -> None:
        self.words[self.section] = self.words.get(self.section, "") + data.replace("\u00a0", " ")
