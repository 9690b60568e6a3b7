"""NASViT for tests: small instances, and the published network written out on a state dict of the public names."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.spaces.base import ImageShape, round_to_eight
from fedloom.spaces.nasvit import ConvolutionBlock, NASViT, NASViTSettings
from fedloom.supernets.foreign import PUBLIC
from fedloom.supernets.nasvit import NASViTSupernet
from fedloom.supernets.normalisation import Statistics

CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # float32, some forty blocks, logits of order one


def space_of(classes: int = 10, size: int = 32, channels: int = 3, **settings: Any) -> NASViT:
    return NASViT(NASViTSettings(**settings), ImageShape(channels, size, classes))


def original(classes: int = 10) -> NASViT:
    return NASViT(NASViTSettings.original(), ImageShape(3, 224, classes))


def narrow(**settings: Any) -> NASViT:
    """Several widths per stage, residues 0, 1 and 4 of the tokens, odd and even maps."""
    return space_of(3, 12, 1, **{"width": 0.25, "strides": (1, 1, 2, 1, 2, 1, 1), "resolutions": (9, 11, 12, 16), **settings})


def with_values(space: NASViT, **values: int) -> Architecture:
    """The smallest architecture, but for these values of genes ("width_of_stage_4")."""
    choices = [0] * len(space.genes)
    for index, gene in enumerate(space.genes):
        if gene.name.replace(" ", "_") in values:
            choices[index] = gene.values.index(values[gene.name.replace(" ", "_")])
    return space.canonical(choices)


def reference(state: dict[str, Tensor], space: NASViT, architecture: Architecture, images: Tensor) -> Tensor:
    """The published network in plain operations on the public names: every slice and every formula spelled out."""
    values = [gene.values[choice] for gene, choice in zip(space.genes, architecture.choices, strict=True)]
    stem, *widths, features = (round_to_eight(width * space.settings.width) for width in values[1:10])
    depths, kernels, expansions = values[10:17], values[17:24], values[24:]

    def norm(x: Tensor, key: str) -> Tensor:
        mean, variance, weight, bias = (
            state[f"{key}.bn.bn.{name}"][: x.shape[1], None, None] for name in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / (variance + 1e-5).sqrt() * weight + bias

    def full(x: Tensor, key: str, outputs: int, stride: int = 1) -> Tensor:
        weight = state[f"{key}.conv.conv.weight"][:outputs, : x.shape[1]]
        return F.conv2d(x, weight, None, stride, weight.shape[-1] // 2)

    def silu(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    def squeeze_excite(x: Tensor, key: str) -> Tensor:
        count = x.shape[1]
        hidden = round_to_eight(count // 4)
        pooled = x.mean((2, 3))
        inside = pooled @ state[f"{key}.reduce.weight"][:hidden, :count, 0, 0].T + state[f"{key}.reduce.bias"][:hidden]
        gate = inside.clamp(min=0) @ state[f"{key}.expand.weight"][:count, :hidden, 0, 0].T + state[f"{key}.expand.bias"][:count]
        return x * ((gate + 3).clamp(0, 6) / 6)[:, :, None, None]

    def inverted_residual(x: Tensor, key: str, outputs: int, kernel: int, expansion: int, stride: int) -> Tensor:
        inputs, size, inner = x.shape[1], x.shape[-1], f"{key}.mobile_inverted_conv"
        middle = inputs * expansion
        y = x if expansion == 1 else silu(norm(full(x, f"{inner}.inverted_bottleneck", middle), f"{inner}.inverted_bottleneck"))
        weight = state[f"{inner}.depth_conv.conv.conv.weight"][:middle]
        cut = (weight.shape[-1] - kernel) // 2
        weight = weight[:, :, cut : cut + kernel, cut : cut + kernel]  # the centre, without a transformation
        y = silu(norm(F.conv2d(y, weight, None, stride, kernel // 2, 1, middle), f"{inner}.depth_conv"))
        if f"{inner}.depth_conv.se.fc.reduce.weight" in state:
            y = squeeze_excite(y, f"{inner}.depth_conv.se.fc")
        y = norm(full(y, f"{inner}.point_linear", outputs), f"{inner}.point_linear")
        if stride == 2:  # zeros around a map of odd side take part in the mean
            x = F.pad(x, (1, 1, 1, 1)) if size % 2 else x
            half = x.shape[-1] // 2 * 2
            x = sum(x[:, :, a:half:2, b:half:2] for a in (0, 1) for b in (0, 1)) / 4
        if inputs != outputs:
            x = full(x, f"{key}.shortcut", outputs)
        return x + y

    def attention_block(x: Tensor, key: str, depth: int) -> Tensor:
        count, width, size, _ = x.shape
        tokens, heads = size**2, width // 8
        t = x.flatten(2).transpose(1, 2)

        def linear(y: Tensor, name: str, outputs: int) -> Tensor:
            return y @ state[f"{key}.{name}.linear.weight"][:outputs, : y.shape[-1]].T + state[f"{key}.{name}.linear.bias"][:outputs]

        def layer_norm(y: Tensor, name: str) -> Tensor:
            y = (y - y.mean((1, 2), keepdim=True)) / (y.var((1, 2), unbiased=False, keepdim=True) + 1e-5).sqrt()
            return y * state[f"{key}.{name}.weight"][:width] + state[f"{key}.{name}.bias"][:width]

        y = layer_norm(t, "norm1")
        q, k = (linear(y, f"attn.{name}", width).reshape(count, tokens, heads, 8) for name in "qk")
        v = linear(y, "attn.v", 4 * width).transpose(1, 2).reshape(count, 4 * width, size, size)
        v = F.conv2d(v, state[f"{key}.attn.vconv.weight"][: 4 * width], None, 1, 1, 1, 4 * width)
        v = v.reshape(count, heads, 32, tokens)
        product = torch.einsum("nthc,nshc->ntsh", q, k) / math.sqrt(8)
        table = state[f"{key}.attn.relative_position_bias_table"]
        side = math.isqrt(len(table))
        where = torch.tensor([[(a // size - b // size, a % size - b % size) for b in range(tokens)] for a in range(tokens)])
        product = product + table[(where[..., 0] + side // 2) * side + where[..., 1] + side // 2][..., :heads]
        product = linear(linear(product, "attn.proj_l", heads).softmax(2), "attn.proj_w", heads)
        y = linear(silu(torch.einsum("ntsh,nhcs->nthc", product, v).reshape(count, tokens, -1)), "attn.proj", width)
        scale, feed = (state[f"{key}.rescale_{name}"][depth, tokens % 8, :width] * 8 / width for name in ("attn", "mlp"))
        t = t + y * scale
        t = t + linear(silu(linear(layer_norm(t, "norm3"), "mlp2.linear1", width)), "mlp2.linear2", width) * feed
        t = t + linear(silu(linear(layer_norm(t, "norm2"), "mlp1.linear1", width)), "mlp1.linear2", width) * feed
        return t.transpose(1, 2).reshape(x.shape)

    x = F.interpolate(images, size=values[0], mode="bicubic")
    x = silu(norm(full(x, "first_conv", stem, space.settings.stem_stride), "first_conv"))
    first = 0
    for stage, width in enumerate(widths):
        for index in range(depths[stage]):
            key = f"blocks.{first + index}"
            if stage >= 3 and index:
                x = attention_block(x, key, depths[stage])
            else:
                stride = space.settings.strides[stage] if index == 0 else 1
                x = inverted_residual(x, key, width, kernels[stage], expansions[stage], stride)
        first += (2, 5, 6, 6, 9, 8, 6)[stage]
    x = silu(norm(full(x, "last_conv.final_expand_layer", 6 * widths[-1]), "last_conv.final_expand_layer"))
    x = silu(full(x.mean((2, 3), keepdim=True), "last_conv.feature_mix_layer", features)).flatten(1)
    return x @ state["classifier.linear.linear.weight"][:, :features].T + state["classifier.linear.linear.bias"]


def public_state(space: NASViT, seed: int = 0) -> dict[str, Tensor]:
    """Random weights and statistics under the public names, at the public shapes for this instance's widths."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    window = space.settings.window
    outline = space.outline(space.named["largest"])

    def put(key: str, *shape: int, scale: float = 1.0) -> None:
        state[key] = torch.randn(shape, generator=generator) * scale

    def layer(key: str, *shape: int, bias: bool = False) -> None:
        put(f"{key}.weight", *shape, scale=1 / math.sqrt(math.prod(shape[1:])))
        if bias:
            put(f"{key}.bias", shape[0], scale=0.3)

    def vectors(key: str, channels: int) -> None:
        put(f"{key}.weight", channels, scale=0.3)
        put(f"{key}.bias", channels, scale=0.3)
        state[f"{key}.weight"] += 1

    def norm(key: str, channels: int) -> None:
        vectors(f"{key}.bn.bn", channels)
        for place in ("bn", "bn_tracking.0", "bn_tracking.1"):
            put(f"{key}.bn.{place}.running_mean", channels, scale=0.2)
            state[f"{key}.bn.{place}.running_var"] = 0.5 + torch.rand(channels, generator=generator)
            state[f"{key}.bn.{place}.num_batches_tracked"] = torch.tensor(0)

    layer("first_conv.conv.conv", outline.stem, outline.image.channels, 3, 3)
    norm("first_conv", outline.stem)
    for number, block in enumerate(outline.blocks):
        key = f"blocks.{number}"
        if isinstance(block, ConvolutionBlock):
            inner = f"{key}.mobile_inverted_conv"
            put(f"{inner}.rescale", block.outputs)
            if block.expands:
                layer(f"{inner}.inverted_bottleneck.conv.conv", block.middle, block.inputs, 1, 1)
                norm(f"{inner}.inverted_bottleneck", block.middle)
            layer(f"{inner}.depth_conv.conv.conv", block.middle, 1, block.kernel, block.kernel)
            norm(f"{inner}.depth_conv", block.middle)
            if block.squeeze:
                layer(f"{inner}.depth_conv.se.fc.reduce", block.squeeze, block.middle, 1, 1, bias=True)
                layer(f"{inner}.depth_conv.se.fc.expand", block.middle, block.squeeze, 1, 1, bias=True)
            layer(f"{inner}.point_linear.conv.conv", block.outputs, block.middle, 1, 1)
            norm(f"{inner}.point_linear", block.outputs)
            layer(f"{key}.shortcut.conv.conv", block.outputs, block.inputs, 1, 1)
            continue
        width, heads = block.width, block.heads
        for name in ("norm1", "norm2", "norm3"):
            vectors(f"{key}.{name}", width)
        for name, outputs, inputs in (("q", width, width), ("k", width, width), ("v", 4 * width, width), ("proj", width, 4 * width)):
            layer(f"{key}.attn.{name}.linear", outputs, inputs, bias=True)
        layer(f"{key}.attn.vconv", 4 * width, 1, 3, 3)
        for name in ("proj_l", "proj_w"):
            layer(f"{key}.attn.{name}.linear", heads, heads, bias=True)
        put(f"{key}.attn.relative_position_bias_table", (2 * window - 1) ** 2, heads)
        state[f"{key}.attn.relative_position_index"] = torch.zeros(window**2, window**2, dtype=torch.int64)
        for name in ("mlp1.linear1", "mlp1.linear2", "mlp2.linear1", "mlp2.linear2"):
            layer(f"{key}.{name}.linear", width, width, bias=True)
        for name in ("rescale_mlp", "rescale_attn"):
            put(f"{key}.{name}", 10, 8, width, scale=3.0)  # so that the branches matter
    layer("last_conv.final_expand_layer.conv.conv", outline.head, outline.last, 1, 1)
    norm("last_conv.final_expand_layer", outline.head)
    layer("last_conv.feature_mix_layer.conv.conv", outline.features, outline.head, 1, 1)
    layer("classifier.linear.linear", outline.image.classes, outline.features, bias=True)
    return state


def imported(state: dict[str, Tensor], supernet: NASViTSupernet) -> tuple[dict[str, Tensor], Statistics]:
    parts, table = PUBLIC["nasvit"].make.split(state, supernet), PUBLIC["nasvit"].make.table(supernet)
    weights = {name: parts[table[name]].reshape(shape) for name, shape in supernet.shapes.items()}
    norms = [name.removesuffix(".running_mean") for name in table if name.endswith(".running_mean")]
    return weights, Statistics({n: (parts[table[f"{n}.running_mean"]], parts[table[f"{n}.running_var"]]) for n in norms})
