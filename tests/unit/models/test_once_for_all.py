"""Imported once-for-all weights compute the published network, written out layer by layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.models import load_supernet
from fedloom.spaces.base import ImageShape
from fedloom.spaces.mobilenetv3 import DEPTHS, EXPANSIONS, KERNELS, MobileNetV3Settings
from fedloom.supernets.base import make_supernet
from fedloom.supernets.elastic import elastic_kernel
from support.checks import Fedloom
from support.foreign import public_state


def hard_swish(x: Tensor) -> Tensor:
    return x * (x + 3).clamp(0, 6) / 6


def published(state: dict[str, Tensor], images: Tensor, kernels: list[int], expansions: list[int], depths: list[int]) -> Tensor:
    """The once-for-all MobileNetV3 (Cai et al. 2020, section 3; Howard et al. 2019, section 5) from its public state dict, in plain
    torch: no code, table or layer of ours. Stage strides 2-1-1-1-1 and stem stride 2, for the tiny instance."""

    def norm(x: Tensor, name: str) -> Tensor:
        mean, variance, scale, shift = (
            state[f"{name}.{part}"][: x.shape[1]].view(1, -1, 1, 1) for part in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / torch.sqrt(variance + 1e-5) * scale + shift

    def kernel_of(name: str, size: int) -> Tensor:
        """The middle of the next larger kernel, times a matrix, once per step down."""
        weight = state[f"{name}.conv.weight"]
        for larger, smaller in ((7, 5), (5, 3)):
            if size < larger:
                matrix = state[f"{name}.{larger}to{smaller}_matrix"]
                middle = weight[:, 0, 1 : 1 + smaller, 1 : 1 + smaller]
                weight = torch.einsum("oi,ci->co", matrix, middle.flatten(1)).reshape(-1, 1, smaller, smaller)
        return weight

    def excite(x: Tensor, name: str) -> Tensor:
        hidden = max(8, int(x.shape[1] // 4 + 4) // 8 * 8)
        hidden += 8 * (hidden < 0.9 * (x.shape[1] // 4))
        y = x.mean((2, 3))
        y = (y @ state[f"{name}.reduce.weight"][:hidden, : x.shape[1], 0, 0].T + state[f"{name}.reduce.bias"][:hidden]).relu()
        y = y @ state[f"{name}.expand.weight"][: x.shape[1], :hidden, 0, 0].T + state[f"{name}.expand.bias"][: x.shape[1]]
        return x * ((y + 3).clamp(0, 6) / 6)[:, :, None, None]

    x = hard_swish(norm(F.conv2d(images, state["first_conv.conv.weight"], None, 2, 1), "first_conv.bn"))
    first = "blocks.0.conv"
    y = norm(F.conv2d(x, state[f"{first}.depth_conv.conv.weight"], None, 1, 1, 1, x.shape[1]), f"{first}.depth_conv.bn").relu()
    x = x + norm(F.conv2d(y, state[f"{first}.point_linear.conv.weight"]), f"{first}.point_linear.bn")
    for stage in range(5):
        for place in range(depths[stage]):
            number = 4 * stage + place
            name, stride = f"blocks.{number + 1}.conv", 2 if stage == place == 0 else 1
            act = torch.relu if stage < 2 else hard_swish
            wide = expansions[number] * x.shape[1]  # tiny widths are multiples of 8, so nothing is rounded
            y = F.conv2d(x, state[f"{name}.inverted_bottleneck.conv.conv.weight"][:wide])
            y = act(norm(y, f"{name}.inverted_bottleneck.bn.bn"))
            kernel = kernel_of(f"{name}.depth_conv.conv", kernels[number])[:wide]
            y = act(norm(F.conv2d(y, kernel, None, stride, kernels[number] // 2, 1, wide), f"{name}.depth_conv.bn.bn"))
            if stage in (1, 3, 4):
                y = excite(y, f"{name}.depth_conv.se.fc")
            y = norm(F.conv2d(y, state[f"{name}.point_linear.conv.conv.weight"][:, :wide]), f"{name}.point_linear.bn.bn")
            x = x + y if stride == 1 and x.shape[1] == y.shape[1] else y
    x = hard_swish(norm(F.conv2d(x, state["final_expand_layer.conv.weight"]), "final_expand_layer.bn")).mean((2, 3))
    x = hard_swish(x @ state["feature_mix_layer.conv.weight"][:, :, 0, 0].T)
    return x @ state["classifier.linear.weight"].T + state["classifier.linear.bias"]


def test_logits_are_those_of_the_published_network(fedloom_: Fedloom, tmp_path: Path) -> None:
    settings = MobileNetV3Settings(width=0.1, stem_stride=2, strides=(2, 1, 1, 1, 1))
    state = public_state("mobilenetv3", make_supernet("mobilenetv3", settings, ImageShape(3, 32, 5)))
    torch.save(state, tmp_path / "theirs.pth")
    given = ["mobilenetv3.width=0.1", "mobilenetv3.strides=[2,1,1,1,1]"]  # the stem's stride is the public one
    assert fedloom_("import-weights", "mobilenetv3", "theirs.pth", *given, "--size", 32).code == 0
    supernet, weights, statistics = load_supernet(tmp_path / "mobilenetv3.safetensors")
    assert supernet.space.settings == settings
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    generator = np.random.default_rng(0)
    for architecture in [*supernet.space.named.values(), *(supernet.space.sample(generator) for _ in range(12))]:
        kernels, expansions, depths = architecture.choices[:20], architecture.choices[20:40], architecture.choices[40:]
        with torch.no_grad():
            theirs = published(
                state, images, [KERNELS[k] for k in kernels], [EXPANSIONS[e] for e in expansions], [DEPTHS[d] for d in depths]
            )
            ours = supernet.forward(
                images, supernet.take(weights, architecture), architecture, supernet.take_statistics(statistics, architecture)
            )
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
        assert theirs.std(0).max() > 1e-3  # images matter


def test_a_smaller_kernel_is_the_middle_times_a_matrix() -> None:
    """Entry by entry, as section 3.3 of the once-for-all paper says it."""
    generator = torch.Generator().manual_seed(0)
    weight, five, three = (torch.randn(shape, generator=generator) for shape in ((2, 1, 7, 7), (25, 25), (9, 9)))
    for channel in range(2):
        middle = [weight[channel, 0, row, column] for row in range(1, 6) for column in range(1, 6)]
        expected = torch.stack([sum((five[k, i] * middle[i] for i in range(25)), torch.zeros(())) for k in range(25)]).view(5, 5)
        assert torch.allclose(elastic_kernel(weight[:, :, 1:6, 1:6], 5, five.view(5, 5, 25), None)[channel, 0], expected, atol=1e-4)
        inner = expected[1:4, 1:4].flatten()
        expected = torch.stack([sum((three[k, i] * inner[i] for i in range(9)), torch.zeros(())) for k in range(9)]).view(3, 3)
        cut = five.view(5, 5, 25)[1:4, 1:4]
        assert torch.allclose(elastic_kernel(weight[:, :, 1:6, 1:6], 3, cut, three)[channel, 0], expected, atol=1e-4)
