"""kNN-Per: what is stored, the choice of its share, and a model that stays whole in files. The rule: supernets/test_neighbours.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom.assemble import new_run
from fedloom.config import Settings
from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidConfig
from fedloom.engine.run import Watcher
from fedloom.models import load_model
from fedloom.models.export import FORMATS
from fedloom.models.predict import read_model
from fedloom.supernets.mobilenetv3 import MobileNetV3Supernet
from fedloom.supernets.neighbours import with_neighbours
from fedloom.testing import Played
from fedloom.testing.plugged import plugged
from support.toy import TOY

LEARNT = ("training.rate=0.1", "training.epochs=4", "split.size=40", "split.test_size=30", "participants=3", "knnper.neighbours=5")


@pytest.fixture
def played(tiny: Callable[..., Settings]) -> Played:
    played = Played(tiny("method=knnper", *LEARNT))
    played.round()
    return played


def test_the_network_is_fedavgs_and_stays_so(played: Played, tiny: Callable[..., Settings]) -> None:
    plainly = Played(tiny("method=fedavg", *LEARNT))
    plainly.round()
    answer = played.farewell("client-000")
    assert answer.model is not None
    for name, array in plainly.state.weights.items():
        assert np.array_equal(played.state.weights[name], array) and np.array_equal(answer.model.arrays[name], array), name


def test_the_client_stores_its_training_images_and_chooses_by_validation_images(played: Played) -> None:
    """By hand, for each share in turn, on what the model's arrays say."""
    data, answer = played.federation.data_of("client-000"), played.farewell("client-000")
    assert answer.model is not None
    arrays = {name: torch.from_numpy(array) for name, array in answer.model.arrays.items()}
    keys, values, share = arrays["classifier.keys"], arrays["classifier.values"], arrays["classifier.share"].item()
    assert torch.equal(values.argmax(1), data.train.labels) and torch.equal(values.sum(1), torch.ones(len(data.train)))
    network = played.tools.supernet.load(Architecture.parse(answer.model.architecture), arrays)
    head = network.get_submodule("classifier")
    network.set_submodule("classifier", torch.nn.Identity())
    with torch.no_grad():
        stored, seen = (network(played.tools.pixels.normalise(part.images)) for part in (data.train, data.validation))
        assert torch.allclose(stored, keys, atol=1e-4)
        logits, hits = seen @ arrays["classifier.weight"].T + arrays["classifier.bias"], {}
        for tenth in range(11):
            said = with_neighbours(seen, logits, keys, values, 5, torch.tensor(tenth / 10), torch.tensor(1.0))
            hits[tenth] = (said.argmax(1) == data.validation.labels).sum().item()
        assert hits[round(10 * share)] == max(hits.values())
        assert answer.diary.validation_accuracy == max(hits.values()) / len(data.validation)
    assert answer.diary.notes == {"neighbours_share": pytest.approx(share)}
    cost = played.tools.space.cost(Architecture.parse(answer.model.architecture)).macs
    assert answer.diary.trained_macs == len(data.train) * cost and head.nearest == 5


def test_few_images_are_all_asked(tiny: Callable[..., Settings]) -> None:
    played = Played(tiny("method=knnper", "knnper.neighbours=1000"))
    answer = played.farewell("client-000")
    assert answer.model is not None
    assert answer.model.arrays["classifier.count"] == len(played.federation.data_of("client-000").train)


def test_validation_images_are_stored_with_rejoin(played: Played, tiny: Callable[..., Settings]) -> None:
    again, data = Played(tiny("method=knnper", *LEARNT, "training.rejoin=true")), played.federation.data_of("client-000")
    instruction = played.method.farewell(played.state, "client-000")
    one, other = played.answer(instruction), again.answer(instruction)
    assert one.model is not None and other.model is not None
    assert [len(answer.model.arrays["classifier.keys"]) for answer in (one, other) if answer.model] == [
        len(data.train),
        len(data.train) + len(data.validation),
    ]
    assert one.model.arrays["classifier.share"] == other.model.arrays["classifier.share"]
    assert one.diary.validation_accuracy == other.diary.validation_accuracy


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "onnx"])
def test_files_hold_the_whole_model(format: str, tiny: Callable[..., Settings], nobody: Watcher, tmp_path: Path) -> None:
    """Saved by a run, exported, read again and asked, it says the same; and its neighbours change what it says."""
    result = new_run(tiny("method=knnper", *LEARNT), tmp_path / "run", nobody)
    network, facts = load_model(tmp_path / "run" / "clients" / result.clients[0].name / "model.safetensors")
    ending, write = FORMATS[format]
    write(tmp_path / f"model.{ending}", network, facts)
    model = read_model(tmp_path / f"model.{ending}")
    images = np.random.default_rng(0).integers(0, 256, (7, 1, 8, 8), dtype=np.uint8)
    head = network.get_submodule("classifier")
    original = replace(model, logits=network)
    assert torch.allclose(model.probabilities(images), original.probabilities(images), atol=1e-6)
    said = original.probabilities(images)
    head.get_buffer("share").fill_(1.0 if head.get_buffer("share").item() < 0.5 else 0.0)
    assert not torch.allclose(original.probabilities(images), said, atol=1e-3)


def test_a_space_whose_networks_follow_from_its_supernet(tiny: Callable[..., Settings], tmp_path: Path) -> None:
    """Saved, loaded and exported, it has the accuracy that the client found."""
    with plugged(TOY):
        played = Played(tiny("method=knnper", "space=toy", "knnper.neighbours=3"))
        answer, data = played.farewell("client-000"), played.federation.data_of("client-000")
        assert answer.model is not None
        arrays = {name: torch.from_numpy(array) for name, array in answer.model.arrays.items()}
        network = played.tools.supernet.load(Architecture.parse(answer.model.architecture), arrays)
        images = played.tools.pixels.normalise(data.test.images)
        program = torch.export.export(network, (images,)).module()
        with torch.no_grad():
            said = network(images)
            assert torch.allclose(program(images), said, atol=1e-5)
        assert (said.argmax(1) == data.test.labels).double().mean().item() == answer.diary.test_accuracy
        assert torch.allclose(said.exp().sum(1), torch.ones(len(said)), atol=1e-5)  # logarithms of probabilities


def test_a_space_without_room_for_neighbours_is_refused(tiny: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    network = torch.nn.Sequential()
    network.add_module("classifier", torch.nn.Identity())
    monkeypatch.setattr(MobileNetV3Supernet, "network", lambda self, architecture: network)
    with pytest.raises(InvalidConfig, match=r"no nn\.Linear.*Choose another space"):
        Played(tiny("method=knnper"))
