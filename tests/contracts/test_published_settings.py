"""Every published setting that the search methods can run has a preset, and the preset means it."""

from __future__ import annotations

import pytest

from fedloom.config import Settings, load, presets
from fedloom.core.architecture import Architecture
from fedloom.core.seeds import rng
from fedloom.data.splits import SplitSettings
from fedloom.methods.base import METHODS
from fedloom.report.published import published
from fedloom.spaces.base import ImageShape
from fedloom.spaces.nasvit import NASViTSettings
from fedloom.supernets.base import make_supernet

CLASSES = {"cifar10": 10, "cifar100": 100, "cinic10": 10, "tinyimagenet": 200, "digits": 10}
ALL = {name: load(name) for name in presets()}
SEARCH = ("perfedsde", "perfedrlnas", "spider")


def preset_for(method: str, dataset: str, space: str, clients: int) -> list[Settings]:
    def same(one: Settings) -> bool:
        return (one.method, one.data.name, one.space, one.clients) == (method, dataset, space, clients)

    return [one for one in ALL.values() if same(one)]


def searches() -> list[tuple[str, str, str, int]]:
    """(method, data set, space, clients) of all published searches by methods that we have. SPIDER with 100 clients was run by others, who
    do not say how."""
    found = {(one.method, one.dataset, one.space, int(one.protocol.split()[0])) for one in published() if one.method in SEARCH}
    return sorted(key for key in found if key[0] != "spider" or key[3] == 8)


@pytest.mark.parametrize(("method", "dataset", "space", "clients"), searches())
def test_a_published_search_has_a_preset(method: str, dataset: str, space: str, clients: int) -> None:
    found = preset_for(method, dataset, space, clients)
    assert found, f"no preset runs {method} on {dataset} in {space} with {clients} clients"
    for one in found:
        if clients == 100:
            assert one.split.rule == "plato" and one.split.alpha == (0.1 if dataset == "cifar100" else 0.3)
            assert (one.split.size, one.split.test_size) == (SplitSettings.size, SplitSettings.test_size) == (600, 600)
        else:
            assert (one.participants, one.rounds, one.split.rule, one.split.alpha) == (8, 1000, "label", 0.2)


def test_claims_of_presets_of_perfedrlnas() -> None:
    """They said "as in its paper" of a space, an optimiser and a fine-tuning that are not the paper's."""
    own = {name: text for name, text in presets().items() if name.startswith("perfedrlnas-") and ALL[name].space == "mobilenetv3"}
    assert len(own) == 5 and not [name for name, text in own.items() if "as in its paper" in text]
    assert "this project's MobileNetV3 space and training" in own["perfedrlnas-cifar10"]
    for name in ("perfedrlnas-cifar10-darts", "perfedrlnas-cifar100-darts"):
        training = ALL[name].training
        assert (training.batch, training.rate, training.weight_decay, training.finetune_epochs) == (32, 0.025, 3e-4, 0)
    for name in ("perfedrlnas-cifar10-nasvit", "perfedrlnas-cifar100-nasvit", "perfedrlnas-cifar10-224"):
        one = ALL[name]
        recipe = (one.training.optimiser, one.training.rate, one.training.weight_decay, one.training.label_smoothing)
        assert recipe == ("adamw", 5e-4, 0.05, 0.1) and (one.training.batch, one.training.finetune_epochs, one.training.cutout) == (
            32,
            0,
            0,
        )
        assert (one.clients, one.participants, one.rounds) == (100, 5, 1500)
    assert ALL["perfedrlnas-cifar10-nasvit"].components["nasvit"] == NASViTSettings.original()


@pytest.mark.parametrize(
    ("preset", "network", "words"),
    [("baselines-cifar10", "mobilenetv3-large", "MobileNetV3-Large"), ("silos-cifar10", "resnet18", "ResNet-18")],
)
def test_baselines_have_the_network_of_their_table(preset: str, network: str, words: str) -> None:
    methods = {one.method for one in published() if one.what.startswith(words) and one.method in METHODS}
    assert len(methods) > 3
    space = make_supernet("networks", ALL[preset].components["networks"], ImageShape(3, 32, 10)).space
    for method in methods:
        found = space.find(ALL[preset].components[method].architecture, rng(0))
        assert found == space.find(network, rng(0)), method


def test_hapfnas_has_its_phases_and_images() -> None:
    for name in ("hapfnas-cifar10", "hapfnas-cifar100", "hapfnas-tinyimagenet"):
        one = ALL[name]
        assert one.participants == one.clients and round(one.rounds * one.components["hapfnas"].supernet_share) == 120
        assert one.split.server == 0.1 and (1 - one.split.server) * one.split.validation == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize("name", sorted(name for name in ALL if ALL[name].data.name in CLASSES))  # others are for one's own images
def test_the_space_of_a_preset_can_be_made(name: str) -> None:
    one = ALL[name]
    size = {"digits": 8, "tinyimagenet": 64}.get(one.data.name, 32)
    channels = 1 if one.data.name == "digits" else 3
    space = make_supernet(one.space, one.components[one.space], ImageShape(channels, size, CLASSES[one.data.name])).space
    for architecture in space.named.values():
        space.check(Architecture.parse(architecture.id))
