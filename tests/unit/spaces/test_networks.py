"""The named networks are those that papers use: their sizes, and what they compute, against modules written anew."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.errors import InvalidConfig
from fedloom.spaces.base import Cost, ImageShape
from fedloom.spaces.networks import Networks, NetworksSettings
from fedloom.supernets.networks import NetworksSupernet

CIFAR, IMAGENET = ImageShape(3, 32, 10), ImageShape(3, 224, 1000)


def cost(name: str, image: ImageShape, **given: int) -> Cost:
    space = Networks(NetworksSettings(**given), image)
    return space.cost(space.named[name])


def test_sizes_are_the_published_ones() -> None:
    assert cost("resnet18", CIFAR).parameters == 11_173_962  # with the stem for 32 pixels and 10 classes
    assert cost("resnet18", CIFAR).macs == 555_422_720
    large = cost("mobilenetv3-large", IMAGENET, halvings=5)
    assert large.parameters == 5_483_032  # torchvision's mobilenet_v3_large
    assert large.macs == pytest.approx(219e6, rel=0.02)  # Howard et al., Table 3
    # 6 blocks of 128 with 8 heads of 64 and hidden 256, patches of 4 pixels.
    block = 2 * 2 * 128 + 128 * 3 * 512 + (512 + 1) * 128 + (128 + 1) * 256 + (256 + 1) * 128
    assert cost("vit", CIFAR).parameters == (3 * 16 + 1) * 128 + 66 * 128 + 6 * block + 2 * 128 + 129 * 10


def test_widths_are_those_of_heterofl() -> None:
    """Parameters of a width are about its square; the transformer has one width."""
    space = Networks(NetworksSettings(), CIFAR)
    whole = space.cost(space.named["resnet18"]).parameters
    for choice, share in enumerate((1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)):
        assert space.cost(space.canonical((2, choice))).parameters == pytest.approx(whole * share**2, rel=0.05)
    assert {space.canonical((1, choice)) for choice in range(5)} == {space.named["vit"]} and space.architectures == 11


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2))
        changes = stride > 1 or inputs != outputs
        self.side = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[1](self.two(F.relu(self.norms[0](self.one(x)))))
        return F.relu(y + self.side(x))


@torch.no_grad()
def test_resnet_computes_what_modules_compute() -> None:
    """With the supernet's weights one by one in the order of the modules."""
    supernet = NetworksSupernet(Networks(NetworksSettings(width=0.25), ImageShape(3, 16, 5)))
    architecture = supernet.space.named["resnet18"]
    sizes = [(16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    blocks = [Block(*size) for size in sizes]
    network = nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 5))
    own = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in supernet.plain(supernet.initial(0), architecture).items()}
    modules = [("resnet.stem", stem[0], stem[1])]
    for number, block in enumerate(blocks):
        name = f"resnet.stage{number // 2 + 1}.block{number % 2 + 1}"
        modules += [(f"{name}.first", block.one, block.norms[0]), (f"{name}.second", block.two, block.norms[1])]
        modules += [(f"{name}.across", *block.side)] if isinstance(block.side, nn.Sequential) else []
    for name, conv, norm in modules:
        conv.weight.copy_(own[f"{name}.conv.weight"])
        norm.weight.copy_(own[f"{name}.norm.weight"])
        norm.bias.copy_(own[f"{name}.norm.bias"])
    network[-1].weight.copy_(own["classifier.resnet.weight"])
    network[-1].bias.copy_(own["classifier.resnet.bias"])
    images = torch.randn(6, 3, 16, 16)
    assert sum(one.numel() for one in network.parameters()) == sum(one.numel() for one in own.values())
    torch.testing.assert_close(supernet.forward(images, own, architecture), network(images), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_transformer_computes_what_modules_compute() -> None:
    """Blocks as torch's encoder layers that normalise first, whose heads are together as wide as the tokens."""
    supernet = NetworksSupernet(Networks(NetworksSettings(width=1.0), ImageShape(1, 8, 3)))
    architecture = supernet.space.named["vit"]
    own = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in supernet.plain(supernet.initial(0), architecture).items()}
    x = F.conv2d(images := torch.randn(4, 1, 8, 8), own["vit.patches.weight"], own["vit.patches.bias"], 4).flatten(2).transpose(1, 2)
    x = torch.cat([own["vit.patches.token"].expand(4, 1, -1), x], 1) + own["vit.patches.positions"]
    for number in range(1, 7):
        name = f"vit.block{number}"
        y = F.layer_norm(x, (128,), own[f"{name}.before.weight"], own[f"{name}.before.bias"])
        heads = [F.linear(y, part).reshape(4, 5, 8, 64).transpose(1, 2) for part in own[f"{name}.parts.weight"].chunk(3)]
        seen = F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(4, 5, 512)
        x = x + F.linear(seen, own[f"{name}.project.weight"], own[f"{name}.project.bias"])
        y = F.layer_norm(x, (128,), own[f"{name}.between.weight"], own[f"{name}.between.bias"])
        y = F.gelu(F.linear(y, own[f"{name}.hidden.weight"], own[f"{name}.hidden.bias"]))
        x = x + F.linear(y, own[f"{name}.output.weight"], own[f"{name}.output.bias"])
    x = F.layer_norm(x[:, 0], (128,), own["vit.norm.weight"], own["vit.norm.bias"])
    expected = F.linear(x, own["classifier.vit.weight"], own["classifier.vit.bias"])
    torch.testing.assert_close(supernet.forward(images, own, architecture), expected, rtol=1e-4, atol=1e-4)


def test_patches_must_divide_images() -> None:
    with pytest.raises(InvalidConfig, match=r"networks\.patch is 5, which does not divide the 32 pixels.*divisor"):
        Networks(NetworksSettings(patch=5), CIFAR)


def test_maps_of_mobilenet_are_halved_from_behind() -> None:
    """Fewer halvings leave out the first ones: small images keep their detail."""
    for halvings, side in ((5, 1), (3, 4), (0, 32)):
        space = Networks(NetworksSettings(halvings=halvings), CIFAR)
        assert space.pieces(space.named["mobilenetv3-large"])[-3].size == side  # type: ignore[union-attr]


def test_the_transformer_is_exported_for_any_number_of_images() -> None:
    """ResNet-18 is the largest, which tests of exports take."""
    supernet = NetworksSupernet(Networks(NetworksSettings.tiny(), ImageShape(1, 8, 3)))
    network = supernet.network(supernet.space.named["vit"]).eval()
    program = torch.export.export(network, (torch.randn(2, 1, 8, 8),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    images = torch.randn(5, 1, 8, 8)
    torch.testing.assert_close(program.module()(images), network(images), rtol=1e-4, atol=1e-4)
