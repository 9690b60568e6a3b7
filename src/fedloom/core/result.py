"""What a run writes down: one ledger entry per participation, and one result made from nothing but the ledger."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from fedloom.core.judgement import Judgement, pooled
from fedloom.core.privacy import UPDATE, Departures
from fedloom.core.reading import parse_json

SCHEMA = "fedloom.result/1"
MEANS = ("balanced_accuracy", "calibration_error", "calibrated_error", "accepted", "noise_accepted")  # over clients, of result.json


@dataclass(frozen=True)
class LedgerEntry:
    """One participation of one client: what crossed the line, what it cost, what it achieved."""

    client: str
    round: int
    final: bool  # the participation that ends a run, without upload
    bytes_down: int
    bytes_up: int
    uploads: tuple[str, ...]
    seconds: Mapping[str, float]  # by stage
    architecture: str
    validation_accuracy: float | None
    test_accuracy: float | None
    trained_macs: int
    evaluated_architectures: int
    peak_memory_mb: float
    process_memory_mb: float  # measured: the highest of this process so far
    notes: Mapping[str, float] = field(default_factory=dict)
    tier: int = 0  # of the client's simulated hardware
    simulated_seconds: float = 0.0  # what training, scoring and messages would have taken there
    late: bool = False  # its report came after the deadline and was not waited for
    upload_bytes: Mapping[str, int] = field(default_factory=dict)  # by field; together bytes_up
    scored_macs: int = 0
    upload_shapes: Mapping[str, str] = field(default_factory=dict)  # by field, in words
    judged: Judgement | None = None  # of the personal model, at the final participation

    def to_json(self) -> str:
        return json.dumps(_said(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> LedgerEntry:
        """Raises ValueError or TypeError for anything ``to_json`` did not write."""
        values = parse_json(line)
        if not isinstance(values, dict):
            raise TypeError(f"{line!r} is no entry")
        for item in fields(cls):
            if item.name in _LATER and item.name not in values:
                continue
            if item.name == "judged":
                values["judged"] = _judgement(values["judged"])
                continue
            if type(values.get(item.name)) not in _KINDS[str(item.type)]:
                raise ValueError(f"{item.name} is {values.get(item.name)!r}")
            inside: Any = values.get(item.name)
            parts = inside.values() if isinstance(inside, dict) else inside if isinstance(inside, list) else ()
            if odd := [part for part in parts if type(part) not in _INSIDE[str(item.type)]]:
                raise ValueError(f"{item.name} holds {odd[0]!r}")
            amounts = parts if item.name == "seconds" else [inside] if item.type == "float" else []
            if odd := [amount for amount in amounts if not possible(amount)]:
                raise ValueError(f"{item.name} is {odd[0]!r}")
        return cls(**{**values, "uploads": tuple(values["uploads"])})


def _said(line: LedgerEntry | ClientResult) -> dict[str, Any]:
    """As a table, without a judgement that there is not."""
    return {name: value for name, value in asdict(line).items() if name != "judged" or value is not None}


def _judgement(values: Any) -> Judgement | None:
    try:
        return None if values is None else Judgement.of(values)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"judged is damaged ({error})") from error


def possible(amount: float) -> bool:
    """Whether a number of seconds or megabytes can have been one; sums of others would not be finite."""
    return 0 <= amount <= 1e15


_KINDS: dict[str, tuple[type, ...]] = {  # type of a field -> what JSON may give for it
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "tuple[str, ...]": (list,),
    "Mapping[str, float]": (dict,),
    "Mapping[str, int]": (dict,),
    "Mapping[str, str]": (dict,),
}
_INSIDE: dict[str, tuple[type, ...]] = {
    "tuple[str, ...]": (str,),
    "Mapping[str, float]": (int, float),
    "Mapping[str, int]": (int,),
    "Mapping[str, str]": (str,),
}
_LATER = (
    "tier",
    "simulated_seconds",
    "late",
    "upload_bytes",
    "scored_macs",
    "upload_shapes",
    "judged",
)  # which ledgers of earlier versions do not have


@dataclass
class Ledger:
    """Running totals over entries; entries of rounds are not kept, so that memory does not grow with rounds."""

    bytes_up: int = 0
    bytes_down: int = 0
    trained_macs: int = 0
    scored_macs: int = 0
    evaluated_architectures: int = 0
    peak_memory_mb: float = 0.0
    simulated_seconds: float = 0.0  # of all rounds but the last, each as long as its slowest participant or its deadline
    slowest: float = 0.0  # of the last round
    last_round: int = -1
    stages: dict[str, float] = field(default_factory=dict)
    uploads: set[str] = field(default_factory=set)
    best_ever: dict[str, float] = field(default_factory=dict)  # client -> best test accuracy of any participation
    latest: dict[str, float] = field(default_factory=dict)  # client -> test accuracy at its last participation in a round
    final: dict[str, LedgerEntry] = field(default_factory=dict)
    departures: Departures = field(default_factory=Departures)

    def add(self, entries: Iterable[LedgerEntry]) -> None:
        for entry in entries:
            self.bytes_up += entry.bytes_up
            self.bytes_down += entry.bytes_down
            self.trained_macs += entry.trained_macs
            self.scored_macs += entry.scored_macs
            self.evaluated_architectures += entry.evaluated_architectures
            self.peak_memory_mb = max(self.peak_memory_mb, entry.peak_memory_mb)
            self.uploads |= set(entry.uploads)
            if UPDATE in entry.uploads:
                self.departures.add(entry.client, entry.round, entry.late)
            if not entry.final:
                self._add_time(entry)
            for stage, seconds in entry.seconds.items():
                self.stages[stage] = self.stages.get(stage, 0.0) + seconds
            if entry.test_accuracy is not None:
                self.best_ever[entry.client] = max(entry.test_accuracy, self.best_ever.get(entry.client, 0.0))
                if not entry.final:
                    self.latest[entry.client] = entry.test_accuracy
            if entry.final:
                self.final[entry.client] = entry

    def _add_time(self, entry: LedgerEntry) -> None:
        if entry.round != self.last_round:
            self.simulated_seconds, self.slowest, self.last_round = self.simulated_seconds + self.slowest, 0.0, entry.round
        self.slowest = max(self.slowest, entry.simulated_seconds)


@dataclass(frozen=True)
class ClientResult:
    """A client's line in the result. Accuracies are shares, 0 to 1."""

    name: str
    test_accuracy: float
    validation_accuracy: float
    architecture: str
    parameters: int
    macs: int
    train_examples: int
    test_examples: int
    judged: Judgement | None = None  # nothing in runs of earlier versions


@dataclass(frozen=True)
class RunResult:
    """result.json, schema fedloom.result/1. ``accuracy`` has ``mean`` and ``std`` over clients, of the model chosen on validation data
    (protocol clean); two others are there to compare with papers that report them: ``last_participation_*``, of the network each client
    had trained at its last participation in a round (its best member, where it searches), and ``best_ever_*``, each client's best of the
    whole run."""

    method: str
    space: str
    dataset: str
    protocol: str
    seed: int
    rounds: int  # completed
    finished: bool
    clients: tuple[ClientResult, ...]
    ledger: Ledger
    seconds: float
    environment: Mapping[str, Any]
    privacy: Mapping[str, Any] = field(default_factory=dict)  # epsilon and delta, where noise is added
    one_class: tuple[str, ...] = ()  # clients whose test images are all of one class: their accuracies say little
    classes: tuple[str, ...] = ()  # their names

    @property
    def accuracy(self) -> dict[str, float | None]:
        """Of the personal models on test data, over clients; nothing without clients."""
        ledger, found = self.ledger, {}
        found[""] = [client.test_accuracy for client in self.clients]
        found["last_participation_"] = [ledger.latest[client.name] for client in self.clients if client.name in ledger.latest]
        found["best_ever_"] = [ledger.best_ever[client.name] for client in self.clients]
        both = {which: dict(zip(("mean", "std"), mean_and_std(values), strict=True)) for which, values in found.items()}
        return {f"{which}{what}": value for which, pair in both.items() for what, value in pair.items()}

    def to_json(self) -> str:
        ledger = self.ledger
        return json.dumps(
            {
                "schema": SCHEMA,
                **{name: getattr(self, name) for name in ("method", "space", "dataset", "protocol", "seed", "rounds", "finished")},
                "accuracy": self.accuracy,
                **by_class([client.judged for client in self.clients if client.judged], self.classes),
                "clients": [_said(client) for client in self.clients],
                "cost": {
                    "seconds": round(self.seconds, 3),
                    "stages": {stage: round(seconds, 3) for stage, seconds in sorted(ledger.stages.items())},
                    "bytes_up": ledger.bytes_up,
                    "bytes_down": ledger.bytes_down,
                    "trained_macs": ledger.trained_macs,
                    "scored_macs": ledger.scored_macs,
                    "evaluated_architectures": ledger.evaluated_architectures,
                    "peak_memory_mb": round(ledger.peak_memory_mb, 3),
                    "simulated_seconds": round(ledger.simulated_seconds + ledger.slowest, 3),
                },
                "uploads": sorted(ledger.uploads),
                **({"privacy": dict(self.privacy)} if self.privacy else {}),
                **({"one_class": list(self.one_class)} if self.one_class else {}),
                "environment": dict(self.environment),
            },
            indent=2,
        )


def by_class(judged: Sequence[Judgement], classes: Sequence[str]) -> dict[str, Any]:
    """``judged`` of result.json: all clients' test images together, each image judged by its own client's model."""
    if not judged:
        return {}
    matrix, bins = pooled(judged)
    rows = [
        {"name": name, "images": of, "sensitivity": right / of if of else None, "precision": right / said if said else None}
        for name, right, of, said in zip(classes, matrix.diagonal().tolist(), matrix.sum(1).tolist(), matrix.sum(0).tolist(), strict=True)
    ]
    means = {name: mean_and_std([getattr(one, name) for one in judged])[0] for name in MEANS}
    aurocs = [one.auroc for one in judged if one.auroc is not None]
    means |= {"auroc": mean_and_std(aurocs)[0]} if aurocs else {}
    return {"judged": {**means, "classes": rows, "confusion": matrix.tolist(), "reliability": [list(entry) for entry in bins]}}


def mean_and_std(values: list[float]) -> tuple[float | None, float | None]:
    """Over clients (population standard deviation); nothing without clients."""
    if not values:
        return None, None
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
