"""Three rounds of every method as whole numbers and text: nothing in them depends on how a processor rounds."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedloom.assemble import new_run
from fedloom.config import Settings
from fedloom.core.architecture import Architecture
from fedloom.core.client_site import ClientSite
from fedloom.core.messages import Instruction
from fedloom.core.method import Answer
from fedloom.engine.run import Watcher
from fedloom.files import read_arrays
from fedloom.methods.base import METHODS
from fedloom.training.scoring import Scorer
from support.perfedsde import PUBLISHED

HERE = Path(__file__).parent
OVERRIDES = (
    *("clients=4", "participants=2", "rounds=3", "fedavg.architecture=medium", "local.architecture=random"),
    *("mobilenetv3.width=0.05", "mobilenetv3.strides=[2, 2, 1, 1, 1]", "darts.channels=2", "darts.input_size=0", "nasvit.depth=1"),
)
COLUMNS = ("client", "round", "final", "bytes_down", "bytes_up", "uploads", "evaluated_architectures", "trained_macs", "architecture")
FACTS = ("schema", "method", "space", "dataset", "protocol", "seed", "rounds", "finished", "uploads")
FOLLOWS_SCORES = {  # what hangs on accuracies, and so on rounding; some send as many bytes as a subnet has
    "perfedsde": {"trained_macs", "architecture"},
    "spider": {"trained_macs", "architecture"},
    "perfedrlnas": {"trained_macs", "architecture", "bytes_up", "bytes_down"},
    "hapfnas": {"trained_macs", "architecture", "bytes_up", "bytes_down"},
    "fednas": {"trained_macs", "architecture", "bytes_up", "bytes_down"},
    "fedoras": {"trained_macs", "architecture", "bytes_up", "bytes_down"},
    "fedrlnas": {"trained_macs", "architecture", "bytes_up", "bytes_down"},
}


def digest(method: str, settings: Settings, folder: Path, nobody: Watcher) -> dict[str, Any]:
    seeds: list[int] = []
    populations: dict[str, Sequence[str]] = {}  # client -> what it scores first, when it has no memory yet
    newcomer: list[str] = []
    kind: Any = METHODS[method].make
    answer, score = kind.answer, Scorer.score_subnets

    def listen(self: Any, instruction: Instruction, site: ClientSite) -> Answer:
        seeds.append(instruction.seed)
        newcomer[:] = [] if site.memory.arrays else [site.name]
        return answer(self, instruction, site)

    def listen_to_scores(self: Scorer, weights: Any, architectures: Sequence[Architecture], *more: Any) -> Any:
        if newcomer:
            populations[newcomer.pop()] = [architecture.id for architecture in architectures]
        return score(self, weights, architectures, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "answer", listen)
        patch.setattr(Scorer, "score_subnets", listen_to_scores)
        new_run(settings, folder, nobody)
    entries = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    rounded = FOLLOWS_SCORES.get(method, set())
    columns = [column for column in COLUMNS if column not in rounded]
    result = json.loads((folder / "result.json").read_text())
    split, data = read_arrays(folder / "state" / "split.safetensors")
    return {
        "columns": ["seed", *columns],
        "participations": [[seed, *(entry[column] for column in columns)] for seed, entry in zip(seeds, entries, strict=True)],
        "first populations": populations,
        "result": {
            **{name: result[name] for name in FACTS},
            **{name: result["cost"][name] for name in ("bytes_up", "bytes_down", "evaluated_architectures") if name not in rounded},
            "clients": [[client["name"], client["train_examples"], client["test_examples"]] for client in result["clients"]],
        },
        "data": data,
        "split": {name: zlib.crc32(array.astype("<i8").tobytes()) for name, array in sorted(split.items())},
    }


def in_lines(digest: dict[str, Any]) -> str:
    """JSON with one participation in each line, so that a difference can be read."""
    parts = []
    for name, value in digest.items():
        if name == "participations":
            text = "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in value) + "\n ]"
        elif name == "first populations":
            text = "{\n" + ",\n".join(f"  {json.dumps(client)}: {json.dumps(value[client], indent=3)}" for client in sorted(value)) + "\n }"
        else:
            text = json.dumps(value)
        parts.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


@pytest.mark.parametrize("method", list(METHODS))
def test_three_rounds(method: str, tiny: Callable[..., Settings], nobody: Watcher, renew: bool, tmp_path: Path) -> None:
    got = digest(method, tiny(f"method={method}", *OVERRIDES), tmp_path / "run", nobody)
    path = HERE / f"{method}.json"
    if renew:
        path.write_text(in_lines(got))
    assert path.exists(), f"{method} has no digest yet: FEDLOOM_RENEW_GOLDEN=1 pytest tests/golden writes it"
    expected = json.loads(path.read_text())
    again = json.loads(json.dumps(got))
    assert sorted(again) == sorted(expected)
    for name in expected:
        assert again[name] == expected[name], f"{name} changed; see tests/golden/conftest.py if that was meant"


def test_the_published_algorithm_by_its_settings(tiny: Callable[..., Settings], nobody: Watcher, tmp_path: Path) -> None:
    """PerFedSDE-NAS as published is what these settings say, whatever the defaults, and it is what it was."""
    settings = tiny("method=perfedsde", *OVERRIDES, *PUBLISHED)
    again = json.loads(json.dumps(digest("perfedsde", settings, tmp_path / "run", nobody)))
    assert again == json.loads((HERE / "perfedsde.json").read_text())


def test_a_digest_belongs_to_every_method_and_holds_no_fractions() -> None:
    files = {path.stem: path for path in HERE.glob("*.json")}
    assert set(files) == set(METHODS)

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no whole number: it may be another one on another processor")

    for path in files.values():
        json.loads(path.read_text(), parse_float=refuse)
