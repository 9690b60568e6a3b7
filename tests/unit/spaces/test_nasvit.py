"""The NASViT space: published figures, blocks and costs by hand, settings, drawing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fedloom.core.errors import InvalidConfig
from fedloom.core.seeds import rng
from fedloom.spaces.nasvit import AttentionBlock, ConvolutionBlock, NASViT
from fedloom.supernets.nasvit import NASViTSupernet
from support.nasvit import narrow, original, space_of, with_values


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


def test_what_follows_what_by_hand() -> None:
    space = original()
    places = {gene.name: (gene.stage, gene.place) for gene in space.genes}
    assert [places[name] for name in ("resolution", "width of the stem", "kernel of stage 3", "width of the features")] == [
        (0, 0),
        (0, 1),
        (3, 0),
        (8, 0),
    ]
    followers = {
        gene.name: [space.genes[other].name for other in np.flatnonzero(row)] for gene, row in zip(space.genes, space.follows, strict=True)
    }
    assert followers["resolution"] == ["width of the stem"]
    assert followers["width of the stem"] == [f"{what} of stage 1" for what in ("width", "depth", "kernel", "expansion")]
    assert followers["depth of stage 2"] == [f"{what} of stage 3" for what in ("width", "depth", "kernel", "expansion")]
    assert followers["kernel of stage 7"] == ["width of the features"]
    assert followers["width of the features"] == []


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


def test_a_shallow_instance_has_the_genes_of_all() -> None:
    space = space_of(depth=0.5)
    assert space.genes == space_of().genes
    assert [space.depths(stage) for stage in (0, 1, 4, 5)] == [[1, 1], [2, 2, 3], [2, 2, 3, 3, 4, 4, 5], [2, 2, 3, 3, 4, 4]]
    outline = space.outline(with_values(space, depth_of_stage_5=7))
    assert [block.name for block in outline.blocks if block.name.startswith("stage5")] == [f"stage5.block{n}" for n in (1, 2, 3, 4)]
    assert outline.blocks[10] == AttentionBlock("stage5.block4", 112, 4, 3)  # after 1 + 2 + 2 + 2 + 3 blocks; 24 pixels halved thrice
    assert [len(space.outline(space.named[name]).blocks) for name in ("smallest", "largest")] == [13, 22]


@pytest.mark.parametrize(
    "space", [narrow(), narrow(depth=0.4), narrow(stem_stride=2), space_of(width=0.25), space_of(size=8, resolutions=(6, 7, 8, 9))]
)
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
