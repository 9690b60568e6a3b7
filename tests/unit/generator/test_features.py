"""Image features: shapes, resizing, normalisation, a layer by hand, and weights that are refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from fedloom.core.errors import InvalidData
from fedloom.generator.features import BasicBlock, ResNet18, SmallFeatures, frozen_extractor, load_features, prepared

HALF = (0.5, 0.5, 0.5)
QUARTER = (0.25, 0.25, 0.25)


def random_images(count: int, channels: int, side: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count, channels, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def resnet_state() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {**ResNet18().state_dict(), "fc.weight": torch.ones(1000, 512), "fc.bias": torch.ones(1000)}


# -- pixels -------------------------------------------------------------------------------
def test_pixels_are_normalised_by_fixed_numbers() -> None:
    black_and_white = torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1).expand(2, 3, 4, 4)
    assert prepared(black_and_white, 4, HALF, QUARTER)[:, 0, 0, 0].tolist() == [-2, 2]
    per_channel = prepared(black_and_white, 4, (0, 0.5, 1), (1, 0.5, 0.25))[1, :, 0, 0]
    assert per_channel.tolist() == [1, 1, 0]


def test_one_channel_becomes_three_equal_ones() -> None:
    pixels = prepared(random_images(2, 1, 8), 8, HALF, QUARTER)
    assert pixels.shape == (2, 3, 8, 8) and torch.equal(pixels[:, 0], pixels[:, 1]) and torch.equal(pixels[:, 0], pixels[:, 2])


def test_larger_images_are_averaged_and_smaller_ones_interpolated() -> None:
    rows = torch.tensor([0, 100, 200, 100], dtype=torch.uint8)[:, None].expand(1, 1, 4, 4)
    smaller = prepared(rows, 2, (0, 0, 0), (1 / 255,) * 3)[0, 0]
    assert smaller[:, 0].tolist() == pytest.approx([50, 150], abs=1e-3)
    larger = prepared(torch.tensor([[[[0, 0], [100, 100]]]], dtype=torch.uint8), 4, (0, 0, 0), (1 / 255,) * 3)[0, 0]
    assert larger[:, 0].tolist() == pytest.approx([0, 25, 75, 100], abs=1e-3)


def test_images_of_two_channels_are_refused() -> None:
    with pytest.raises(InvalidData, match="1 or 3 channels, these have 2"):
        prepared(torch.zeros(1, 2, 8, 8, dtype=torch.uint8), 8, HALF, QUARTER)


# -- networks -----------------------------------------------------------------------------
def test_small_features() -> None:
    network = SmallFeatures(classes=7)
    assert 250_000 < sum(parameter.numel() for parameter in SmallFeatures().parameters()) < 350_000
    assert not [name for name, _ in network.named_buffers()]  # no running statistics
    assert network(random_images(2, 3, 32)).shape == (2, 7)
    extractor = frozen_extractor(SmallFeatures(), network.state_dict(), "here")
    assert (extractor.name, extractor.size) == ("small", 128)
    for channels, side in ((3, 32), (1, 8), (3, 64)):
        features = extractor(random_images(3, channels, side))
        assert features.shape == (3, 128) and features.dtype == torch.float32 and features.isfinite().all() and not features.requires_grad
    with pytest.raises(ValueError, match="without classes"):
        SmallFeatures()(random_images(1, 3, 32))


def test_an_image_has_the_same_features_alone_and_among_many() -> None:
    extractor = frozen_extractor(SmallFeatures(), SmallFeatures().state_dict(), "here")
    images = random_images(130, 3, 32)  # more than two chunks
    together = extractor(images)
    assert torch.allclose(
        torch.cat([extractor(images[:1]), extractor(images[70:71]), extractor(images[129:])]), together[[0, 70, 129]], atol=1e-5
    )
    assert extractor(images[:0]).shape == (0, 128)
    assert not torch.allclose(together[0], together[1], atol=1e-3)


def test_a_block_of_resnet_by_hand() -> None:
    block = BasicBlock(1, 1, 1).eval()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()
        block.conv1.weight[0, 0, 1, 1] = 2  # twice the input
        block.conv2.weight[0, 0, 1, 1] = 3
        block.bn1.weight.fill_(1)
        block.bn2.weight.fill_(1)
        block.bn1.eps = block.bn2.eps = 0
        block.bn2.running_mean.fill_(4)
        block.bn2.running_var.fill_(4)
        result = block(torch.tensor([[[[1.0, -1.0], [5.0, 0.0]]]]))
    # relu((3 relu(2 x) - 4) / 2 + x): 1 -> (6 - 4) / 2 + 1; -1 -> -2 - 1; 5 -> (30 - 4) / 2 + 5; 0 -> -2
    assert result.flatten().tolist() == [2, 0, 18, 0]


def test_resnet18_has_the_public_names_and_shapes(resnet_state: dict[str, Tensor]) -> None:
    parameters = {name: tensor for name, tensor in ResNet18().named_parameters()}
    assert sum(tensor.numel() for tensor in parameters.values()) == 11_689_512 - 513_000  # the published count less the classifier's
    assert tuple(resnet_state["layer2.0.downsample.0.weight"].shape) == (128, 64, 1, 1)
    assert tuple(resnet_state["layer4.1.bn2.running_var"].shape) == (512,)
    assert "layer1.0.downsample.0.weight" not in resnet_state and len(parameters) == 60


def test_resnet18_from_a_file(resnet_state: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(resnet_state, tmp_path / "resnet18.pth")
    extractor = load_features(str(tmp_path / "resnet18.pth"))
    assert (extractor.name, extractor.size) == ("resnet18", 512)
    image = random_images(1, 3, 32)
    features = extractor(image)
    assert features.shape == (1, 512) and not extractor.network.training
    pixels = prepared(image, 224, ResNet18.mean, ResNet18.std)
    first = F.max_pool2d(F.relu(F.conv2d(pixels, resnet_state["conv1.weight"], stride=2, padding=3)), 3, 2, 1)
    own = extractor.network
    assert isinstance(own, ResNet18)
    rest = own.layer4(own.layer3(own.layer2(own.layer1(first)))).mean((2, 3))
    assert torch.allclose(features, rest, rtol=1e-3, atol=1e-4)  # fresh batch statistics change nothing but eps
    older = {name: tensor for name, tensor in resnet_state.items() if not name.endswith("num_batches_tracked")}
    save_file({name: tensor.contiguous() for name, tensor in older.items()}, tmp_path / "resnet18.safetensors")
    assert torch.equal(load_features(str(tmp_path / "resnet18.safetensors"))(image), features)


def test_small_features_from_a_file(tmp_path: Path) -> None:
    network = SmallFeatures(classes=3)
    wrapped = {f"model.module.{name}": tensor for name, tensor in network.state_dict().items()}
    torch.save({"state_dict": wrapped, "best": np.float64(0.7)}, tmp_path / "small.pth")
    images = random_images(2, 3, 32)
    extractor = load_features(str(tmp_path / "small.pth"))
    assert extractor.name == "small" and torch.equal(extractor(images), network.features(images))


# -- what is refused ------------------------------------------------------------------------
KEY = "layer3.0.conv1.weight"
WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], Any], tuple[str, ...]]] = {
    "a missing key": (
        lambda state: {name: tensor for name, tensor in state.items() if name != KEY},
        ("weights of ResNet18", "lacks 1 of 100 tensors", KEY),
    ),
    "a deeper network": (lambda state: {**state, "layer1.2.conv1.weight": torch.ones(64, 64, 3, 3)}, ("another network", "layer1.2.conv1")),
    "another shape": (lambda state: {**state, KEY: torch.ones(2, 2)}, (KEY, "(2, 2) where (256, 128, 3, 3) belongs")),
    "whole numbers": (lambda state: {**state, KEY: state[KEY].long()}, (KEY, "cannot be used")),
    "no number": (lambda state: {**state, "bn1.bias": torch.full((64,), float("nan"))}, ("bn1.bias", "cannot be used")),
    "a negative variance": (lambda state: {**state, "bn1.running_var": -torch.ones(64)}, ("bn1.running_var", "cannot be used")),
    "sparse": (lambda state: {**state, KEY: state[KEY].to_sparse()}, (KEY, "sparse or left out")),
    "averages beside": (
        lambda state: {"state_dict": state, "state_dict_ema": {f"module.{key}": tensor for key, tensor in state.items()}},
        ("holds several networks: state_dict, state_dict_ema. Save the state dict of one alone",),
    ),
    "no tensors": (lambda state: {"epoch": 3}, ("holds no tensors by name",)),
    "a list": (lambda state: [torch.ones(2)], ("holds no tensors by name",)),
    "a class of somebody's own": (lambda state: {"hook": Path("x")}, ("pathlib", "could run code", "state_dict()")),
}


@pytest.mark.parametrize(("change", "words"), WRONG.values(), ids=WRONG)
def test_weights_that_do_not_fit(
    resnet_state: dict[str, Tensor], tmp_path: Path, change: Callable[..., Any], words: tuple[str, ...]
) -> None:
    torch.save(change(resnet_state), tmp_path / "theirs.pth")
    with pytest.raises(InvalidData) as refusal:
        load_features(str(tmp_path / "theirs.pth"))
    for word in ("theirs.pth", *words):
        assert word in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "words"), [(b"", "is empty"), (b"no weights at all", "is text"), (bytes(8) + b"{", "damaged"), (None, "No such file")]
)
def test_files_that_hold_no_weights(tmp_path: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / "theirs.pth").write_bytes(content)
    with pytest.raises(InvalidData, match=words):
        load_features(str(tmp_path / "theirs.pth"))


class Attack:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def test_nothing_in_a_file_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"x": Attack()}, "theirs.pth")
    with pytest.raises(InvalidData, match="could run code"):
        load_features("theirs.pth")
    assert not Path("executed").exists()
