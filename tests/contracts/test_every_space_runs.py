"""Every command on every search space, from a run to a prediction."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedloom import config
from fedloom.methods.base import METHODS
from fedloom.methods.fixed import FixedNetwork
from fedloom.models.supernet_weights import save_weights
from fedloom.spaces.base import SPACES, ImageShape
from fedloom.supernets.base import make_supernet
from fedloom.testing.nets import weights_of
from support.checks import Fedloom
from support.kills import Known, content, disk, listening


def marks(space: str) -> list[pytest.MarkDecorator]:
    """What differs little from space to space CI tries on one of them, `make slow` on the others."""
    return [] if space == "mobilenetv3" else [pytest.mark.slow]


FIXED = "networks"  # has no masks and no generator
spaces = pytest.mark.parametrize("space", [pytest.param(name, marks=marks(name)) for name in SPACES if name != FIXED])


def without_generator(space: str) -> list[str]:
    return ["perfedsde.generator=evolution"] if space == FIXED else []


METHOD_SPACES = [(name, entry.make.spaces or list(SPACES)) for name, entry in METHODS.items()]


def _late(name: str, number: int, space: str) -> bool:
    """For `make slow`. CI takes the flagship on every space, others on their first; of those on one fixed network only fedavg."""
    if name == "perfedsde":
        return space == FIXED
    return number > 0 or (name != "fedavg" and issubclass(METHODS[name].make, FixedNetwork))


CASES = [
    *(
        pytest.param(name, "", space, marks=pytest.mark.slow if _late(name, number, space) else ())
        for name, own in METHOD_SPACES
        for number, space in enumerate(own)
    ),
    *(pytest.param("perfedsde", limit, space, marks=pytest.mark.slow) for limit in ("budget", "weights") for space in SPACES),
]


@pytest.mark.parametrize(("method", "limit", "space"), CASES)
def test_run_and_resume(fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, space: str, method: str, limit: str) -> None:
    """Killed before its first state is saved, in the middle of a round and near the end, it resumes to the run that was never stopped."""
    supernet = make_supernet(space, config.load(str(tiny_file)).components[space], ImageShape(1, 8, 10))
    costs = [supernet.space.cost(supernet.space.named[name]).macs for name in ("smallest", "medium")]
    most, start = sum(costs) / 2, tmp_path / "start.safetensors"
    changes = {"": [], "budget": [f"budget.macs={most}"], "weights": [f"weights={start}"]}[limit] + without_generator(space)
    changes += ["fedtp.architecture=vit"] if (method, space) == ("fedtp", FIXED) else []  # the named network that has attention
    save_weights(start, supernet, weights_of(supernet), {})
    copies: list[Path] = []

    def copy(what: str, name: str) -> None:
        if (what, name) in (("replace", "state/server.safetensors"), ("other half ab", "ledger.jsonl")):
            copies.append(Path(shutil.copytree("it", f"copy-{len(copies)}")))

    known: Known | None = None if (method, space) == ("perfedsde", "mobilenetv3") else {}  # one case computes all answers again
    with disk(Path("it"), copy), listening(method, known):
        ran = fedloom_("run", tiny_file, f"space={space}", f"method={method}", "participants=1", "run.folder=it", *changes)
    assert ran.code == 0, ran.err
    start.unlink()  # a resume has a copy of its own
    expected = content(Path("it"))
    result = expected["result.json"]
    assert result["finished"] and len(result["clients"]) == 3
    assert all(client["architecture"].startswith(f"{space}:") and 0 <= client["test_accuracy"] <= 1 for client in result["clients"])
    assert limit != "budget" or all(client["macs"] <= most for client in result["clients"])
    assert len(copies) == (4 if method == "local" else 8)  # a state before each round and one after; a ledger line per round and client
    for stopped in copies[::3]:
        assert (stopped / "ledger.jsonl").read_bytes() != Path("it/ledger.jsonl").read_bytes()
        with listening(method, known):
            again = fedloom_("resume", stopped)
        assert again.code == 0, again.err
        assert content(stopped) == expected


@spaces
@pytest.mark.parametrize("sampling", ["archive", "fair"])
def test_masked_search(fedloom_: Fedloom, tiny_file: Path, space: str, sampling: str) -> None:
    """The search of the sliced execution, up to rounding; and the same every time."""
    # One architecture per client until its first training is over: rounding cannot change what is drawn from it.
    one = ("perfedsde.population=1", "perfedsde.archive_size=1", "perfedsde.offspring=1", "rounds=1", "clients=2", "participants=1")
    found = {}
    for folder, execution in (("sliced", "sliced"), ("masked", "masked"), ("again", "masked")):
        changes = (f"training.execution={execution}", f"perfedsde.sampling={sampling}", f"run.folder={folder}")
        ran = fedloom_("run", tiny_file, f"space={space}", *one, *changes)
        assert ran.code == 0, ran.err
        found[folder] = content(Path(folder))
        del found[folder]["config.toml"]  # names the folder
    assert found["masked"] == found["again"]

    result, ledger = found["masked"]["result.json"], found["masked"]["ledger.jsonl"]
    assert result["finished"] and len(result["clients"]) == 2 and len(ledger) == 1 + 2
    sliced = found["sliced"]["ledger.jsonl"]
    equal = ("client", "final", "architecture", "evaluated_architectures", "trained_macs", "peak_memory_mb", "bytes_up", "uploads")
    for masked_line, sliced_line in zip(ledger, sliced, strict=True):
        assert {name: masked_line[name] for name in equal} == {name: sliced_line[name] for name in equal}
        assert masked_line["notes"].get("covered_share") == sliced_line["notes"].get("covered_share")
        for accuracy in ("validation_accuracy", "test_accuracy"):
            assert abs(masked_line[accuracy] - sliced_line[accuracy]) <= 1 / 4  # an image or two on the edge


@pytest.mark.slow  # the parts are in CI, each in a test of its own and in the how-to page
@pytest.mark.parametrize("space", list(SPACES))
def test_export_predict_draw_and_card(fedloom_: Fedloom, tiny_file: Path, space: str) -> None:
    assert fedloom_("run", tiny_file, f"space={space}", "rounds=1", "run.folder=it", *without_generator(space)).code == 0
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save("image.png")
    answers = []
    formats = {"safetensors": "safetensors", "torch": "pt2", "onnx": "onnx"}
    if space == "nasvit":  # takes long to translate: test_export has it, among the slow tests
        del formats["onnx"]
    for format, ending in formats.items():
        exported = fedloom_("export", "it", "--client", "client-000", "--format", format, "--out", f"model.{ending}")
        assert exported.code == 0, exported.err
        seen = fedloom_("predict", f"model.{ending}", "image.png", "--json", "--top", 10)
        assert seen.code == 0, seen.err
        (image,) = json.loads(seen.out)
        answers.append({one["name"]: one["probability"] for one in image["classes"]})
        assert sum(answers[-1].values()) == pytest.approx(1, abs=1e-4)
        assert answers[-1] == pytest.approx(answers[0], abs=1e-4)
    drawn = fedloom_("draw", "it", "--client", "client-000", "--out", "picture.svg")
    assert drawn.code == 0 and Path("picture.svg").read_text().startswith("<svg"), drawn.err
    card = fedloom_("space", space, "--json", "--classes", 7)
    assert card.code == 0 and json.loads(card.out)["genes"] > 1, card.err
