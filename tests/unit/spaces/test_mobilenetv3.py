"""The MobileNetV3 space and supernet against published and independently counted numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from fedloom.core.errors import InvalidConfig
from fedloom.core.seeds import rng
from fedloom.spaces.base import ImageShape, Tally, round_to_eight
from fedloom.spaces.mobilenetv3 import MobileNetV3, MobileNetV3Settings
from fedloom.supernets.elastic import batch_norm, centre, elastic_kernel, group_norm, pointwise
from fedloom.supernets.mobilenetv3 import MobileNetV3Supernet
from fedloom.supernets.normalisation import Statistics


def space_of(classes: int = 10, size: int = 32, **settings: object) -> MobileNetV3:
    return MobileNetV3(MobileNetV3Settings(**settings), ImageShape(3, size, classes))  # type: ignore[arg-type]


# -- counts ------------------------------------------------------------------
@pytest.mark.parametrize(("classes", "parameters"), [(1000, 7_678_880), (100, 6_525_980), (10, 6_410_690)])
def test_parameters_of_the_supernet(classes: int, parameters: int) -> None:
    shapes = MobileNetV3Supernet(space_of(classes)).shapes
    assert sum(math.prod(shape) for shape in shapes.values()) == parameters
    matrices = {name: shape for name, shape in shapes.items() if name.endswith((".to_five", ".to_three"))}
    assert len(matrices) == 2 * 20
    assert sum(math.prod(shape) for shape in matrices.values()) == 20 * (25**2 + 9**2) == 14_120


@pytest.mark.parametrize(("name", "parameters"), [("smallest", 2_142_602), ("largest", 6_396_570)])
def test_parameters_of_subnets(name: str, parameters: int) -> None:
    space = space_of()
    assert space.cost(space.named[name]).parameters == parameters
    network = MobileNetV3Supernet(space).network(space.named[name])
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters


def test_number_of_architectures() -> None:
    # Per stage 9 operations in each of 2, 3 or 4 blocks.
    assert space_of().architectures == (9**2 + 9**3 + 9**4) ** 5 == 7371**5


def test_genes_by_hand() -> None:
    genes = space_of().genes
    assert len(genes) == 45
    assert (genes[0].name, genes[0].values) == ("kernel of block 1 of stage 1", (3, 5, 7))
    assert (genes[27].name, genes[27].values) == ("expansion of block 4 of stage 2", (3, 4, 6))
    assert (genes[44].name, genes[44].values) == ("depth of stage 5", (2, 3, 4))
    assert [(gene.stage, gene.place) for gene in (genes[0], genes[27], genes[44])] == [(1, 1), (2, 4), (5, 0)]


def test_what_follows_what_by_hand() -> None:
    space = space_of()
    followers = {
        space.genes[gene].name: [space.genes[other].name for other in np.flatnonzero(space.follows[gene])] for gene in (20, 6, 39, 42)
    }
    assert followers == {
        "expansion of block 1 of stage 1": ["kernel of block 2 of stage 1", "expansion of block 2 of stage 1"],
        "kernel of block 3 of stage 2": [  # it is the last block, or it is not
            "kernel of block 4 of stage 2",
            "kernel of block 1 of stage 3",
            "expansion of block 4 of stage 2",
            "expansion of block 1 of stage 3",
        ],
        "expansion of block 4 of stage 5": [],
        "depth of stage 3": [f"{what} of block {block} of stage 3" for what in ("kernel", "expansion") for block in (1, 2, 3, 4)],
    }


def test_blocks_that_a_stage_lacks_have_no_effect() -> None:
    depths = np.array([[0, 1, 2, 0, 1], [2, 2, 2, 2, 2]])
    active = space_of().active_many(np.concatenate([np.ones((2, 40), int), depths], axis=1))
    blocks = "1100 1110 1111 1100 1110".replace(" ", "")
    assert "".join(map(str, active[0].astype(int))) == 2 * blocks + "11111"
    assert active[1].all()


def test_blocks_by_hand() -> None:
    space = space_of(size=32)
    # Kernel 7 and expansion 6 in block 2 of stage 2, depth 3 in stage 2, else the smallest.
    choices = [0] * 45
    choices[5], choices[25], choices[41] = 2, 2, 1
    outline = space.outline(space.canonical(choices))
    names = [block.name for block in outline.blocks]
    assert names[:6] == ["first", "stage1.block1", "stage1.block2", "stage2.block1", "stage2.block2", "stage2.block3"]
    assert len(names) == 1 + 2 + 3 + 2 + 2 + 2
    block = outline.blocks[4]
    assert (block.inputs, block.middle, block.outputs, block.kernel, block.stride) == (40, 240, 40, 7, 1)
    assert (block.squeeze, block.size, block.activation, block.shortcut) == (64, 8, "relu", True)  # 240 / 4 = 60, rounded to 64
    before = outline.blocks[3]
    assert (before.inputs, before.middle, before.outputs, before.kernel, before.stride) == (24, 72, 40, 3, 2)
    assert (before.squeeze, before.size, before.shortcut) == (24, 16, False)  # 72 / 4 = 18 loses a tenth at 16
    assert (outline.stem, outline.head, outline.features, outline.final_size) == (16, 960, 1280, 2)


@pytest.mark.parametrize(
    ("width", "rounded"), [(1, 8), (11, 16), (12, 16), (18, 24), (20, 24), (60, 64), (72, 72), (112 * 0.25, 32), (83, 80)]
)
def test_widths_are_multiples_of_eight_that_lose_at_most_a_tenth(width: float, rounded: int) -> None:
    assert round_to_eight(width) == rounded


@pytest.mark.parametrize(
    "settings", [{"width": 0.25}, {"width": 0.1, "stem_stride": 2}, {"width": 0.25, "strides": (1, 2, 1, 2, 1), "input_size": 20}]
)
def test_multiply_accumulates_against_an_independent_counter(settings: dict[str, object]) -> None:
    space = space_of(size=13, **settings)
    supernet = MobileNetV3Supernet(space)
    draw, images = rng("macs"), torch.zeros(1, 3, 13, 13)
    for architecture in [*space.named.values(), *(space.sample(draw) for _ in range(4))]:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            supernet.network(architecture).eval()(images)
        assert counter.get_total_flops() == 2 * space.cost(architecture).macs
        assert counter.get_total_flops() > 0


def test_multiply_accumulates_of_the_original_instance() -> None:
    space = space_of(classes=1000, size=224, stem_stride=2, strides=(2, 2, 2, 1, 2))
    assert space.cost(space.named["smallest"]).macs == pytest.approx(120e6, rel=0.03)
    assert space.cost(space.named["largest"]).macs == pytest.approx(565e6, rel=0.03)


def test_activations_grow_with_the_map_and_not_with_the_classes() -> None:
    small, large, many = space_of(size=16), space_of(size=32), space_of(size=16, classes=1000)
    architecture = small.named["medium"]
    assert 3.5 < large.cost(architecture).activations / small.cost(architecture).activations < 4.1
    assert many.cost(architecture).activations - small.cost(architecture).activations == 990


# -- settings ----------------------------------------------------------------
@pytest.mark.parametrize("strides", [(2, 2, 2, 1), (2, 2, 2, 1, 2, 1), (2, 2, 3, 1, 2), (0, 1, 1, 1, 1), ()])
def test_impossible_strides_are_refused(strides: tuple[int, ...]) -> None:
    with pytest.raises(InvalidConfig, match="strides must be 5 numbers, each 1 or 2"):
        space_of(strides=strides)


@torch.no_grad()
def test_images_are_resized_inside_the_network() -> None:
    images = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    inside = MobileNetV3Supernet(space_of(size=8, width=0.1, input_size=12))
    outside = MobileNetV3Supernet(space_of(size=12, width=0.1))
    architecture = inside.space.named["smallest"]
    weights = inside.take(inside.initial(0), architecture)
    resized = F.interpolate(images, size=(12, 12), mode="bicubic", align_corners=False)
    assert torch.equal(inside.forward(images, weights, architecture), outside.forward(resized, weights, architecture))
    assert inside.space.cost(architecture) == outside.space.cost(architecture)


# -- weights -----------------------------------------------------------------
def test_in_a_fresh_supernet_all_depths_agree_and_kernels_are_centres() -> None:
    """Residual branches start at zero and kernel matrices at the identity."""
    space = space_of(size=8, width=0.1, strides=(2, 1, 1, 1, 1))
    supernet = MobileNetV3Supernet(space)
    weights = supernet.initial(3)
    choices = np.zeros(45, int)
    choices[40:] = 2
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    shallow, deep = space.named["smallest"], space.canonical(choices)
    logits = [supernet.forward(images, supernet.take(weights, a), a) for a in (shallow, deep)]
    torch.testing.assert_close(*logits)
    plain = supernet.plain(weights, shallow)["stage1.block1.depth.conv.weight"]
    assert torch.equal(plain, weights["stage1.block1.depth.conv.weight"][: len(plain), :, 2:5, 2:5])


def test_regions_by_hand() -> None:
    supernet = MobileNetV3Supernet(space_of())
    choices = [0] * 45
    choices[4], choices[24] = 1, 1  # block 1 of stage 2: kernel 5, expansion 4 on 24 inputs
    regions = supernet.regions(supernet.space.canonical(choices))
    block = "stage2.block1."
    assert regions[f"{block}expand.conv.weight"][0] == slice(0, 96)
    assert regions[f"{block}depth.conv.weight"] == (slice(0, 96), slice(None), slice(1, 6), slice(1, 6))
    assert regions[f"{block}project.conv.weight"][:2] == (slice(None), slice(0, 96))
    assert regions[f"{block}squeeze.reduce.weight"][:2] == (slice(0, 24), slice(0, 96))
    assert regions[f"{block}squeeze.restore.weight"][:2] == (slice(0, 96), slice(0, 24))
    assert regions[f"{block}depth.to_five"] == (slice(0, 5), slice(0, 5), slice(None))
    assert f"{block}depth.to_three" not in regions
    assert regions["stage2.block2.depth.to_five"] == (slice(1, 4), slice(1, 4), slice(None))  # kernel 3
    assert "stage2.block2.depth.to_three" in regions
    assert not any(name.startswith("stage2.block3") for name in regions)
    assert not any("squeeze" in name for name in regions if name.startswith(("stage1", "stage3", "first")))
    largest = supernet.regions(supernet.space.named["largest"])
    assert set(supernet.shapes) - set(largest) == {name for name in supernet.shapes if name.endswith((".to_five", ".to_three"))}


@pytest.mark.parametrize("kernel", [3, 5, 7])
def test_elastic_kernels_are_those_of_once_for_all(kernel: int) -> None:
    """Centre 5x5 of the 7x7, flattened, times a 25x25 matrix; then centre 3x3 of that, times a 9x9 matrix."""
    draw = np.random.default_rng(0)
    weight, five, three = draw.normal(size=(6, 1, 7, 7)), draw.normal(size=(25, 25)), draw.normal(size=(9, 9))
    reference = weight
    if kernel <= 5:
        reference = np.stack([(five @ channel[0, 1:6, 1:6].ravel()).reshape(1, 5, 5) for channel in weight])
    if kernel == 3:
        reference = np.stack([(three @ channel[0, 1:4, 1:4].ravel()).reshape(1, 3, 3) for channel in reference])
    side, rows = centre(7, 7 if kernel == 7 else 5), centre(5, min(kernel, 5))
    made = elastic_kernel(
        torch.from_numpy(weight)[:, :, side, side],
        kernel,
        torch.from_numpy(five).reshape(5, 5, 25)[rows, rows] if kernel < 7 else None,
        torch.from_numpy(three) if kernel == 3 else None,
    )
    np.testing.assert_allclose(made.numpy(), reference, rtol=1e-10)


@pytest.mark.parametrize(("size", "part", "expected"), [(7, 5, slice(1, 6)), (7, 3, slice(2, 5)), (5, 5, slice(0, 5)), (5, 3, slice(1, 4))])
def test_centre(size: int, part: int, expected: slice) -> None:
    assert centre(size, part) == expected


# -- layers ------------------------------------------------------------------
def test_batch_norm_measures_the_biased_moments_of_the_first_rows() -> None:
    x = torch.randn(6, 8, 3, 3, generator=torch.Generator().manual_seed(0))
    weight, bias = torch.full((8,), 2.0), torch.full((8,), 0.5)
    statistics = Statistics(rows=4)
    y = batch_norm(x, weight, bias, "here", statistics)
    mean, variance = statistics["here"]
    torch.testing.assert_close(mean, x[:4].mean((0, 2, 3)))
    torch.testing.assert_close(variance, x[:4].var((0, 2, 3), unbiased=False))
    expected = 2 * (x - mean.view(-1, 1, 1)) / torch.sqrt(variance + 1e-5).view(-1, 1, 1) + 0.5
    torch.testing.assert_close(y, expected)


def test_batch_norm_with_known_statistics_reads_them() -> None:
    x = torch.ones(1, 1, 1, 1) * 5
    known = Statistics({"here": (torch.tensor([1.0]), torch.tensor([4.0 - 1e-5]))})
    y = batch_norm(x, torch.tensor([3.0]), torch.tensor([1.0]), "here", known)
    assert y.item() == pytest.approx(3 * (5 - 1) / 2 + 1)
    with pytest.raises(KeyError):
        batch_norm(x, torch.tensor([3.0]), torch.tensor([1.0]), "elsewhere", known)


def test_group_norm_has_groups_of_eight_channels() -> None:
    x = torch.randn(2, 16, 3, 3, generator=torch.Generator().manual_seed(0))
    y = group_norm(x, torch.ones(16), torch.zeros(16)).reshape(2, 2, -1)
    torch.testing.assert_close(y.mean(2), torch.zeros(2, 2), atol=1e-6, rtol=0)
    torch.testing.assert_close(y.var(2, unbiased=False), torch.ones(2, 2), atol=1e-4, rtol=0)


@pytest.mark.parametrize("bias", [None, torch.arange(5.0)])
def test_pointwise_is_a_convolution(bias: torch.Tensor | None) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 3, 4, 5, generator=generator), torch.randn(5, 3, 1, 1, generator=generator)
    torch.testing.assert_close(pointwise(x, weight, bias), F.conv2d(x, weight, bias))


@pytest.mark.parametrize("settings", [{}, {"width": 0.35, "stem_stride": 2}, {"strides": (1, 2, 1, 2, 2), "input_size": 48}])
def test_blocks_follow_one_another_and_cost_what_they_do_alone(settings: dict[str, object]) -> None:
    """Blocks are made once for all architectures: each must be what a walk from the stem finds, and its cost that of a fresh one."""
    space, draw = space_of(**settings), rng("blocks")
    wide = space.settings.width
    for architecture in [*space.named.values(), *(space.sample(draw) for _ in range(50))]:
        outline, tally = space.outline(architecture), Tally()
        kernels, expansions, depths = architecture.choices[:20], architecture.choices[20:40], architecture.choices[40:]
        first, *blocks = outline.blocks
        before = first
        assert [block.name for block in blocks] == [f"stage{s + 1}.block{b + 1}" for s in range(5) for b in range(2 + depths[s])]
        for block in blocks:
            stage, index = int(block.name[5]) - 1, int(block.name[-1]) - 1
            gene, stride = 4 * stage + index, space.settings.strides[stage] if index == 0 else 1
            assert (block.inputs, block.size, block.stride) == (before.outputs, before.after, stride)
            assert block.kernel == (3, 5, 7)[kernels[gene]]
            assert block.middle == round_to_eight(block.inputs * (3, 4, 6)[expansions[gene]])
            assert block.outputs == round_to_eight((24, 40, 80, 112, 160)[stage] * wide)
            assert block.squeeze == (round_to_eight(block.middle // 4) if stage in (1, 3, 4) else 0)
            before = block
        assert (outline.last, outline.final_size) == (before.outputs, before.after)
        for piece in outline.pieces:
            replace(piece).count(tally)
        assert space.cost(architecture) == tally.cost
