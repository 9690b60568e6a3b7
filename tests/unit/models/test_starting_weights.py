"""Runs that start from a weights file."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom import config
from fedloom.core.errors import DamagedRun, InvalidConfig, InvalidData
from fedloom.data.readers import read
from fedloom.files import read_arrays
from fedloom.models import load_supernet
from fedloom.models.supernet_weights import save_weights, starting_weights
from fedloom.spaces.base import SPACES, ImageShape
from fedloom.supernets.base import make_supernet
from fedloom.supernets.foreign import PUBLIC
from support import foreign
from support.checks import Fedloom, check_refused


@pytest.fixture
def weights_file(fedloom_: Fedloom, tmp_path: Path) -> Callable[..., Path]:
    """A weights file for a run of the tiny federation, of so many classes and channels."""

    def make(classes: int = 10, channels: int = 1, seed: int = 0) -> Path:
        supernet = foreign.tiny("mobilenetv3", ImageShape(channels, 8, classes))
        torch.save(foreign.public_state("mobilenetv3", supernet, seed), tmp_path / "theirs.pth")
        assert (
            fedloom_(
                "import-weights", "mobilenetv3", "theirs.pth", *foreign.overrides("mobilenetv3"), "--size", 8, "--out", "start.safetensors"
            ).code
            == 0
        )
        (tmp_path / "theirs.pth").unlink()
        return tmp_path / "start.safetensors"

    return make


STILL = ("training.rate=1e-12", "training.finetune_epochs=0", "run.folder=mine")  # training changes nothing


@pytest.mark.parametrize("method", ["fedavg", "perfedsde"])
def test_a_run_starts_from_weights(
    fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, weights_file: Callable[..., Path], method: str
) -> None:
    supernet, weights, _ = load_supernet(weights_file())
    outcome = fedloom_("run", tiny_file, f"method={method}", "weights=start.safetensors", *STILL)
    assert outcome.code == 0 and f"It began with the weights in {tmp_path}/start.safetensors; they are for images " in outcome.out
    assert "from the weights in start.safetensors" in outcome.out and "afresh" not in outcome.out
    state, _ = read_arrays(tmp_path / "mine" / "state" / "server.safetensors")
    begun = weights if method == "perfedsde" else supernet.plain(weights, supernet.space.named["smallest"])
    saved = {name.removeprefix("weights/"): array for name, array in state.items() if name.startswith("weights/")}
    assert set(saved) == set(begun)
    assert all(np.allclose(saved[name], tensor, atol=1e-7) for name, tensor in begun.items())


def test_a_classifier_of_other_classes_begins_afresh(
    fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, weights_file: Callable[..., Path]
) -> None:
    _, weights, _ = load_supernet(weights_file(classes=4))
    outcome = fedloom_("run", tiny_file, "method=perfedsde", "weights=start.safetensors", *STILL)
    remark = "their classifier has 4 classes, this run's 10, so that layer begins afresh"
    assert outcome.code == 0 and remark in outcome.out
    assert remark in json.loads((tmp_path / "mine" / "result.json").read_text())["environment"]["weights"]
    state, _ = read_arrays(tmp_path / "mine" / "state" / "server.safetensors")
    assert state["weights/classifier.weight"].shape[0] == 10
    assert all(np.allclose(state[f"weights/{name}"], t, atol=1e-7) for name, t in weights.items() if not name.startswith("classifier."))


def test_another_normalisation_is_remarked_on(
    fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, weights_file: Callable[..., Path]
) -> None:
    """Only where it differs, by a grey level or more, and only if the file tells."""
    supernet, weights, _ = load_supernet(weights_file())
    digits = read(config.load(str(tiny_file)).data)
    (mean,), (std,) = digits.mean, digits.std
    near = {"mean": [mean + 1e-4], "std": [std - 1e-4]}
    for facts, remark in (
        (near, ""),
        ({}, ""),
        ({**near, "mean": None}, ""),
        ({**near, "std": [0.125]}, f"; they are for images normalised by mean {mean + 1e-4:.3f} and std 0.125, "),
        ({**near, "mean": [0.75]}, f"; they are for images normalised by mean 0.750 and std {std - 1e-4:.3f}, "),
    ):
        save_weights(tmp_path / "start.safetensors", supernet, weights, facts)
        found = starting_weights(tmp_path / "start.safetensors", supernet, digits.mean, digits.std)[1]
        assert found == (remark and f"{remark}this run's are by mean {mean:.3f} and std {std:.3f}")
    assert fedloom_("run", tiny_file, "weights=start.safetensors", *STILL).code == 0
    assert json.loads((tmp_path / "mine" / "result.json").read_text())["environment"]["weights"].endswith(found)


@pytest.mark.parametrize(
    ("space", "key", "there", "here"), [("mobilenetv3", "norm", "batch", "group"), ("darts", "operations", "full", "s2")]
)
def test_weights_for_another_choice_are_refused(
    fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, space: str, key: str, there: str, here: str
) -> None:
    """Batch and group normalisation have the same names and shapes, and mean different things."""
    supernet = make_supernet(space, config.load(str(tiny_file)).components[space], ImageShape(1, 8, 10))
    assert getattr(supernet.space.settings, key) == there
    save_weights(tmp_path / "start.safetensors", supernet, supernet.initial(0), {})
    for method in ("perfedsde", "fedavg"):
        given = (f"space={space}", f"method={method}", "weights=start.safetensors", f"{space}.{key}={here}", "run.folder=mine")
        words = (f"holds weights for {space}.{key}={there}", f"this run has {space}.{key}={here}", f"Set {space}.{key}={there}")
        check_refused(fedloom_("run", tiny_file, *given), InvalidConfig, "start.safetensors", *words)
        assert not (tmp_path / "mine").exists()


def test_a_resume_needs_the_weights_file_no_more(
    fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, weights_file: Callable[..., Path]
) -> None:
    """``local`` reads its initial weights at every client: the hardest case."""
    start = weights_file()
    assert fedloom_("run", tiny_file, "method=local", "weights=start.safetensors", "run.folder=mine").code == 0
    mine = tmp_path / "mine"
    models = {path: path.read_bytes() for path in mine.glob("clients/*/model.safetensors")}
    start.unlink()
    (mine / "result.json").unlink()
    (mine / "ledger.jsonl").unlink()
    for path in models:
        path.unlink()
    assert fedloom_("resume", "mine").code == 0
    assert len(models) == 3 and all(path.read_bytes() == content for path, content in models.items())
    (mine / "state" / "weights.safetensors").unlink()
    check_refused(fedloom_("resume", "mine"), DamagedRun, "weights.safetensors is missing")


def test_nasvit_is_imported_for_the_instance_of_the_run(fedloom_: Fedloom, tmp_path: Path) -> None:
    """The refusal's command is the how-to page's, and its outcome fits."""
    public = PUBLIC["nasvit"].make
    torch.save(foreign.public_state("nasvit", make_supernet("nasvit", public.settings, ImageShape(3, 224, 10))), tmp_path / "theirs.pth")
    assert fedloom_("import-weights", "nasvit", "theirs.pth").code == 0
    run = make_supernet("nasvit", SPACES["nasvit"].settings(), ImageShape(3, 32, 10))
    with pytest.raises(InvalidConfig, match=r"here\. Weights of nasvit are imported for the instance of the run: fedloom") as refusal:
        starting_weights(tmp_path / "nasvit.safetensors", run, public.mean, public.std)
    command = str(refusal.value).rpartition(": ")[2]
    assert f"\n$ {command}\n" in (Path(__file__).parents[3] / "docs" / "how-to" / "foreign-weights.md").read_text()
    assert fedloom_(*shlex.split(command.removeprefix("fedloom ").replace("FILE", "theirs.pth"))).code == 0
    weights, remarks = starting_weights(tmp_path / "nasvit.safetensors", run, public.mean, public.std)
    assert set(weights) == set(run.shapes) and remarks == ""
    narrow = make_supernet("nasvit", SPACES["nasvit"].settings(width=0.5, strides=(1, 2, 2, 1, 2, 2, 2)), ImageShape(3, 32, 10))
    with pytest.raises(InvalidConfig, match=r"Give the run the settings .*, nasvit\.width=1\.0 .* 'nasvit\.strides=\[1,2,2,1,2,1,2\]' "):
        starting_weights(tmp_path / "nasvit.safetensors", narrow, public.mean, public.std)


def test_weights_that_do_not_fit_a_run(fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, weights_file: Callable[..., Path]) -> None:
    def refused(kind: type[InvalidConfig] | type[InvalidData], settings: tuple[str, ...], *words: str) -> None:
        check_refused(fedloom_("run", tiny_file, *settings, "run.folder=mine"), kind, *words)
        assert not (tmp_path / "mine").exists()

    weights_file()
    refused(InvalidConfig, ("weights=start.safetensors", "mobilenetv3.width=0.2"), "does not fit", "mobilenetv3.width=0.1")
    refused(InvalidData, ("weights=nothing.safetensors",), "nothing.safetensors", "No such file")
    refused(InvalidData, (f"weights={tiny_file}",), "no weights file of Fedloom", "import-weights")
    weights_file(channels=3)
    refused(InvalidConfig, ("weights=start.safetensors",), "stem.conv.weight", "(8, 3, 3, 3) there and (8, 1, 3, 3) here", "3 channels")
    others = [name for name in SPACES if name != "mobilenetv3"]
    for other in others[:1]:
        refused(InvalidConfig, ("weights=start.safetensors", f"space={other}", "method=fedavg"), "Set space=mobilenetv3")
