"""The NASViT space and supernet against the published figures and definitions."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidConfig
from fedloom.core.seeds import rng
from fedloom.spaces.base import ImageShape, round_to_eight
from fedloom.spaces.nasvit import AttentionBlock, ConvolutionBlock, NASViT, NASViTSettings
from fedloom.supernets.elastic import Statistics
from fedloom.supernets.foreign import PUBLIC
from fedloom.supernets.nasvit import NASViTSupernet, _round_to_eight
from fedloom.supernets.nasvit_attention import joint_norm, position_bias
from nets import weights_of

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


# -- published figures ---------------------------------------------------------
@pytest.mark.parametrize(("classes", "parameters"), [(10, 15_760_688), (1000, 17_725_838)])
def test_parameters_of_the_public_supernet(classes: int, parameters: int) -> None:
    assert original(classes).supernet_as_published() == parameters
    assert space_of(classes).supernet_as_published() == parameters  # strides and resolutions change nothing there


@pytest.mark.parametrize(
    ("name", "classes", "parameters", "macs"),
    [
        ("smallest", 10, 7_396_922, 188_014_960),
        ("largest", 10, 15_759_632, 1_879_744_342),
        ("smallest", 1000, 9_171_992, 189_789_040),
        ("largest", 1000, 17_724_782, 1_881_708_502),
    ],
)
def test_subnets_as_the_public_implementation_counts_them(name: str, classes: int, parameters: int, macs: int) -> None:
    space = original(classes)
    assert space.as_published(space.named[name]) == (parameters, macs)
    assert space.cost(space.named[name]).macs == macs


@pytest.mark.parametrize(
    ("space", "supernet", "smallest", "largest"),
    [(original(), 14_782_840, 6_462_114, 14_716_584), (space_of(), 14_655_888, 6_448_226, 14_606_512)],
    ids=["original", "default"],
)
def test_parameters_that_ours_have(space: NASViT, supernet: int, smallest: int, largest: int) -> None:
    """Fewer than the public implementation's: nothing is kept that no architecture, or not this one, can use."""
    assert sum(math.prod(shape) for shape in NASViTSupernet(space).shapes.values()) == supernet
    for name, parameters in (("smallest", smallest), ("largest", largest)):
        with torch.device("meta"):
            network = NASViTSupernet(space).network(space.named[name])
        assert sum(parameter.numel() for parameter in network.parameters()) == space.cost(space.named[name]).parameters == parameters


@pytest.mark.parametrize(("space", "supernet"), [(original(1000), 16_747_990), (space_of(1000), 16_621_038)], ids=["original", "default"])
def test_parameters_that_ours_have_with_a_thousand_classes(space: NASViT, supernet: int) -> None:
    assert sum(math.prod(shape) for shape in NASViTSupernet(space).shapes.values()) == supernet


def test_multiply_accumulates_of_the_default_instance() -> None:
    space = space_of(1000)
    assert [space.cost(space.named[name]).macs for name in ("smallest", "largest")] == [36_325_520, 300_748_360]
    for strides, macs in (((1, 2, 2, 1, 2, 1, 2), 298.8e6), ((1, 2, 1, 2, 2, 1, 2), 329.7e6), ((1, 2, 2, 1, 2, 1, 1), 372.5e6)):
        other = space_of(strides=strides)
        assert other.cost(other.named["largest"]).macs == pytest.approx(macs, rel=2e-4)


def test_what_the_public_supernet_holds_beyond_ours() -> None:
    heads, widths = (9, 16, 23, 28), (72, 128, 184, 224)  # of the four attention stages, which have 5, 8, 7 and 5 attention blocks
    frozen = 2 * 24 + 5 * 32 + 6 * 40 + sum(widths)  # a vector per convolution block
    shortcuts = 24**2 + 4 * 32**2 + 5 * 40**2  # within a stage the channels never change
    sides = (18, 9, 9, 5)
    positions = sum(count * h * (35**2 - (2 * side - 1) ** 2) for count, h, side in zip((5, 8, 7, 5), heads, sides, strict=True))
    # Summed over a stage's blocks: its depths that reach the block, times its different numbers of tokens modulo 8.
    used = ((4 + 4 + 3 + 2 + 1) * 2, (7 + 7 + 6 + 5 + 4 + 3 + 2 + 1) * 3, (6 + 6 + 5 + 4 + 3 + 2 + 1) * 3, (4 + 4 + 3 + 2 + 1) * 2)
    scales = sum(2 * w * (80 * count - rows) for w, count, rows in zip(widths, (5, 8, 7, 5), used, strict=True))
    assert (frozen, shortcuts, positions, scales) == (1_056, 12_672, 430_664, 533_456)
    assert 15_760_688 - frozen - shortcuts - positions - scales == 14_782_840


def test_genes_by_hand() -> None:
    space = original()
    assert len(space.genes) == 31 and (space.sizes > 1).sum() == 23
    assert (space.genes[0].name, space.genes[0].values) == ("resolution", (192, 224, 256, 288))
    assert [gene.values for gene in space.genes[1:10]] == [
        (16, 24),
        (16, 24),
        (24, 32),
        (32, 40),
        (64, 72),
        (112, 120, 128),
        (160, 168, 176, 184),
        (208, 216, 224),
        (1792, 1984),
    ]
    assert [(gene.values[0], gene.values[-1], len(gene.values)) for gene in space.genes[10:17]] == [
        (1, 2, 2),
        (3, 5, 3),
        (3, 6, 4),
        (3, 6, 4),
        (3, 9, 7),
        (3, 8, 6),
        (3, 6, 4),
    ]
    assert [gene.values for gene in space.genes[17:24]] == [(3, 5), (3, 5), (3,), (3,), (3,), (3,), (3,)]
    assert [gene.values for gene in space.genes[24:]] == [(1,), *[(4, 5, 6)] * 4, (6,), (6,)]
    assert space.architectures == 4 * (2**5 * 3 * 4 * 3 * 2) * (2 * 3 * 4 * 4 * 7 * 6 * 4) * 2**2 * 3**4


def test_blocks_by_hand() -> None:
    space = original()
    values = {"resolution": 288, "width_of_stage_3": 40, "width_of_stage_4": 72, "expansion_of_stage_4": 5, "depth_of_stage_4": 4}
    outline = space.outline(with_values(space, kernel_of_stage_2=5, **values))
    blocks = {block.name: block for block in outline.blocks}
    assert [name for name in blocks if name.startswith("stage4")] == [f"stage4.block{index}" for index in (1, 2, 3, 4)]
    assert blocks["stage1.block1"] == ConvolutionBlock("stage1.block1", 16, 16, 16, 3, 1, False, 0, 144)
    assert blocks["stage2.block1"] == ConvolutionBlock("stage2.block1", 16, 64, 24, 5, 2, True, 0, 144)
    assert blocks["stage3.block2"] == ConvolutionBlock("stage3.block2", 40, 160, 40, 3, 1, True, 40, 36)
    assert blocks["stage4.block1"] == ConvolutionBlock("stage4.block1", 40, 200, 72, 3, 2, True, 0, 36)
    assert blocks["stage4.block3"] == AttentionBlock("stage4.block3", 72, 4, 18)
    assert (blocks["stage4.block3"].heads, blocks["stage4.block3"].row) == (9, "depth4_tokens4")  # type: ignore[union-attr]
    assert blocks["stage7.block1"].size == 9 and blocks["stage7.block2"].size == 5
    assert (outline.stem, outline.last, outline.head, outline.features, outline.final_size) == (16, 208, 1248, 1792, 5)


@pytest.mark.parametrize("space", [narrow(), narrow(stem_stride=2), space_of(width=0.25), space_of(size=8, resolutions=(6, 7, 8, 9))])
def test_multiply_accumulates_against_an_independent_counter(space: NASViT) -> None:
    supernet, draw = NASViTSupernet(space), rng("macs")
    images = torch.zeros(1, space.image.channels, space.image.size, space.image.size)
    for architecture in [*space.named.values(), space.sample(draw), space.sample(draw)]:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            supernet.network(architecture).eval()(images)
        assert counter.get_total_flops() == 2 * space.cost(architecture).macs > 0


def test_activations_grow_with_the_resolution() -> None:
    space = space_of()
    small, large = (space.cost(with_values(space, resolution=resolution)).activations for resolution in (24, 36))
    assert 2.2 < large / small < 3  # 2.25 times the pixels; attention grows faster


def test_input_sizes_of_lists_arrays_and_tensors() -> None:
    space = space_of()
    rows = [space.named["largest"].choices, space.named["smallest"].choices, with_values(space, resolution=32).choices]
    for genes in (rows, np.array(rows), torch.tensor(rows)):
        assert space.input_sizes(genes) == [36, 24, 32]


def test_a_drawing_names_every_block() -> None:
    space = space_of()
    stages = space.drawing(space.named["largest"]).stages
    assert [title for title, _ in stages][:3] == ["stem, 36 pixels", "stage 1, 36 pixels", "stage 2, 36 pixels"]
    assert [len(boxes) for _, boxes in stages] == [1, 2, 5, 6, 6, 9, 8, 6, 3]
    assert (stages[4][1][1].label, stages[4][1][1].detail) == ("attention", "72, 9 heads")
    assert (stages[5][1][0].label, stages[5][1][0].detail) == ("3×3 ×6", "72→432→128, ½, SE")
    assert all(0 < box.share <= 1 for _, boxes in stages for box in boxes)


# -- settings ------------------------------------------------------------------
@pytest.mark.parametrize("strides", [(1, 2, 2, 1, 2, 1), (1, 2, 2, 1, 2, 1, 3), (0, 2, 2, 1, 2, 1, 2), ()])
def test_impossible_strides_are_refused(strides: tuple[int, ...]) -> None:
    with pytest.raises(InvalidConfig, match="strides must be 7 numbers, each 1 or 2"):
        space_of(strides=strides)


@pytest.mark.parametrize("resolutions", [(24, 28, 32), (24, 28, 28, 32), (32, 28, 24, 20), (0, 8, 9, 10), ()])
def test_impossible_resolutions_are_refused(resolutions: tuple[int, ...]) -> None:
    with pytest.raises(InvalidConfig, match="resolutions must be 4 increasing numbers"):
        space_of(resolutions=resolutions)


def test_maps_larger_than_the_window_are_refused_with_the_cure() -> None:
    with pytest.raises(InvalidConfig, match=r"up to 76 give attention maps of 19x19, more than nasvit.window = 18.*nasvit.window=19"):
        space_of(resolutions=(24, 28, 32, 76))
    assert space_of(resolutions=(24, 28, 32, 76), window=19).sides(76)[3] == 19


# -- layers against their published definitions ---------------------------------
def test_joint_norm_is_over_tokens_and_channels_together() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((2, 5, 16), (16,), (16,)))
    mean, variance = x.mean((1, 2), keepdim=True), x.var((1, 2), unbiased=False, keepdim=True)
    expected = (x - mean) / (variance + 1e-5).sqrt() * weight + bias
    torch.testing.assert_close(joint_norm(x, weight, bias, 16), expected)
    # Of the first 16 of 24 channels, the same; a plain layer norm over 24 would count eight zeros per token.
    wide, more = F.pad(x, (0, 8)), torch.ones(8)
    masked = joint_norm(wide, torch.cat([weight, more]), torch.cat([bias, more]), torch.tensor(16), torch.arange(24) < 16)
    torch.testing.assert_close(masked, F.pad(expected, (0, 8)))


def test_position_bias_looks_offsets_up() -> None:
    """As in the public table of 35 x 35 offsets: row (17 + down) * 35 + 17 + right."""
    flat = torch.randn(35 * 35, 2, generator=torch.Generator().manual_seed(0))
    bias = position_bias(flat.reshape(35, 35, 2), 3)
    centre = position_bias(flat.reshape(35, 35, 2)[15:20, 15:20], 3)
    for query in range(9):
        for key in range(9):
            down, right = query // 3 - key // 3, query % 3 - key % 3
            assert torch.equal(bias[:, query, key], flat[(17 + down) * 35 + 17 + right])
    assert torch.equal(bias, centre)


def test_rounding_on_tensors_is_that_of_the_space() -> None:
    widths = torch.arange(8, 400)
    assert _round_to_eight(widths).tolist() == [round_to_eight(width) for width in widths.tolist()]


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
    parts, table = PUBLIC["nasvit"].split(state, supernet), PUBLIC["nasvit"].table(supernet)
    weights = {name: parts[table[name]].reshape(shape) for name, shape in supernet.shapes.items()}
    norms = [name.removesuffix(".running_mean") for name in table if name.endswith(".running_mean")]
    return weights, Statistics({n: (parts[table[f"{n}.running_mean"]], parts[table[f"{n}.running_var"]]) for n in norms})


@pytest.mark.parametrize("space", [narrow(), narrow(stem_stride=2, strides=(2, 1, 1, 1, 1, 1, 1))], ids=["stem 1", "stem 2"])
@torch.no_grad()
def test_imported_weights_compute_the_published_network(space: NASViT) -> None:
    supernet, draw = NASViTSupernet(space), rng("imported")
    state = public_state(space)
    weights, statistics = imported(state, supernet)
    images = torch.randn(2, 1, 12, 12, generator=torch.Generator().manual_seed(1))
    architectures = [*space.named.values(), *(space.sample(draw) for _ in range(8))]
    genes = torch.tensor([architecture.choices for architecture in architectures])
    masked = supernet.forward_many(images, weights, genes, statistics)
    for architecture, logits in zip(architectures, masked, strict=True):
        expected = reference(state, space, architecture, images)
        own = supernet.take_statistics(statistics, architecture)
        scale = float(expected.abs().max())
        for given in (supernet.forward(images, supernet.take(weights, architecture), architecture, own), logits):
            assert float((given - expected).abs().max()) < 1e-5 * scale
        quiet = {name: tensor * ("rescale" not in name) for name, tensor in state.items()}
        assert float((reference(quiet, space, architecture, images) - expected).abs().max()) > 1e-2 * scale  # attention matters


def test_every_public_key_is_used_or_left_over_by_design() -> None:
    space = narrow()
    supernet = NASViTSupernet(space)
    parts, table = PUBLIC["nasvit"].split(public_state(space), supernet), PUBLIC["nasvit"].table(supernet)
    assert set(supernet.shapes) <= set(table) and set(table.values()) <= set(parts)
    assert len(set(table.values())) == len(table)
    left = set(parts) - set(table.values())
    assert [key for key in left if not re.search(PUBLIC["nasvit"].expected_leftovers(supernet), key)] == []
    # Only blocks after the first of a stage, and those whose widths coincide in this instance, have idle shortcuts.
    idle = {key for key in left if ".shortcut." in key}
    assert idle == {f"blocks.{number}.shortcut.conv.conv.weight" for number in (0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12)}
    assert len([name for name in table if name.endswith(".running_var")]) == 3 * 17 - 2 + 2  # mb1 has no expansion; stem and head


def test_public_settings_are_the_original() -> None:
    assert PUBLIC["nasvit"].settings == NASViTSettings.original()


# -- weights -------------------------------------------------------------------
def test_in_a_fresh_supernet_all_depths_of_convolution_stages_agree() -> None:
    """Residual branches start at zero."""
    space = narrow()
    supernet = NASViTSupernet(space)
    weights, images = supernet.initial(3), torch.randn(4, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    shallow, deep = space.named["smallest"], with_values(space, depth_of_stage_1=2, depth_of_stage_2=5, depth_of_stage_3=6)
    torch.testing.assert_close(*(supernet.forward(images, supernet.take(weights, a), a) for a in (shallow, deep)), **CLOSE)
    assert {float(tensor.unique()) for name, tensor in weights.items() if ".scale." in name} == {float(torch.tensor(1e-4))}


def test_regions_by_hand() -> None:
    space = original()
    supernet = NASViTSupernet(space)
    regions = supernet.regions(with_values(space, resolution=224, depth_of_stage_5=5, width_of_stage_5=120, expansion_of_stage_2=5))
    block = "stage5.block2."
    assert regions[f"{block}attention.value.weight"] == (slice(0, 480), slice(0, 120))
    assert regions[f"{block}attention.before.weight"] == (slice(0, 15), slice(0, 15))
    assert regions[f"{block}attention.positions"] == (slice(2, 15), slice(2, 15), slice(0, 15))  # 7 of at most 9 tokens a side
    assert supernet.shapes[f"{block}attention.positions"] == (17, 17, 16)
    scales = [name for name in regions if name.startswith(f"{block}attention.scale.")]
    assert scales == [f"{block}attention.scale.depth5_tokens1"]  # 49 tokens
    assert sum(name.startswith(f"{block}attention.scale.") for name in supernet.shapes) == 7 * 3  # 36, 49, 64, 81 tokens
    assert sum(name.startswith("stage5.block9.attention.scale.") for name in supernet.shapes) == 3  # of depth 9 only
    assert not any(name.startswith("stage5.block6") for name in regions)
    assert regions["stage2.block2.depth.conv.weight"] == (slice(0, 120), slice(None), slice(1, 4), slice(1, 4))
    assert regions["stage2.block1.shortcut.weight"][:2] == (slice(0, 24), slice(0, 16))
    assert "stage1.block1.shortcut.weight" in supernet.shapes and "stage1.block1.shortcut.weight" not in regions  # 16 to 16
    assert "stage2.block2.shortcut.weight" not in supernet.shapes


def test_masked_equals_sliced_where_token_numbers_differ() -> None:
    """Outputs, measured statistics and gradients; float32, against the largest entry: logits 1e-5, moments 1e-4, gradients 1e-3."""
    space = narrow()
    supernet, draw = NASViTSupernet(space), rng("masked")
    images = torch.randn(8, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    architectures = [space.canonical([resolution, *space.sample(draw).choices[1:]]) for resolution in (0, 1, 2, 3, 3)]
    rows = {name.rpartition("_")[2] for architecture in architectures for name in supernet.regions(architecture) if ".scale." in name}
    assert rows == {"tokens0", "tokens1", "tokens4"}
    genes = torch.tensor([architecture.choices for architecture in architectures])
    weights, statistics = weights_of(supernet), Statistics(rows=5)
    with torch.no_grad():
        calibrated = supernet.forward_many(images, weights, genes, statistics)
        for index, architecture in enumerate(architectures):
            measured = Statistics(rows=5)
            logits = supernet.forward(images, supernet.take(weights, architecture), architecture, measured)
            assert float((calibrated[index] - logits).abs().max()) < 1e-5 * float(logits.abs().max())
            own = supernet.take_statistics(Statistics({name: (m[index], v[index]) for name, (m, v) in statistics.items()}), architecture)
            assert set(own) == set(measured)
            for name, moments in measured.items():
                for one, other in zip(own[name], moments, strict=True):
                    torch.testing.assert_close(one, other, **CLOSE)
    leaves = {name: tensor.requires_grad_() for name, tensor in weights.items()}  # with statistics of the batch, as in training
    masked = supernet.forward_many(images, leaves, genes).square().sum()
    sliced = torch.stack([supernet.forward(images, supernet.take(leaves, a), a).square().sum() for a in architectures]).sum()
    both = [torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True) for loss in (masked, sliced)]
    largest = max(float(gradient.abs().max()) for gradient in both[1])
    for one, other in zip(*both, strict=True):
        assert float((one - other).abs().max()) < 1e-3 * max(float(other.abs().max()), 1e-2 * largest)
