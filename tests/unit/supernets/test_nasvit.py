"""The NASViT supernet against the published definitions, and its weights."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from fedloom.core.seeds import rng
from fedloom.spaces.base import round_to_eight
from fedloom.spaces.nasvit import NASViT, NASViTSettings
from fedloom.supernets.foreign import PUBLIC
from fedloom.supernets.joint_norm import joint_norm
from fedloom.supernets.nasvit import NASViTSupernet, _round_to_eight
from fedloom.supernets.nasvit_attention import position_bias
from fedloom.supernets.normalisation import Statistics
from fedloom.testing.nets import weights_of
from support.nasvit import CLOSE, imported, narrow, original, public_state, reference, with_values


def test_joint_norm_is_over_tokens_and_channels_together() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((2, 5, 16), (16,), (16,)))
    mean, variance = x.mean((1, 2), keepdim=True), x.var((1, 2), unbiased=False, keepdim=True)
    expected = (x - mean) / (variance + 1e-5).sqrt() * weight + bias
    torch.testing.assert_close(joint_norm(x, weight, bias, 16), expected)
    # Of the first 16 of 24 channels, the same; a plain layer norm over 24 would count eight zeros per token.
    wide, more = F.pad(x, (0, 8)), torch.ones(8)
    masked = joint_norm(wide, torch.cat([weight, more]), torch.cat([bias, more]), torch.tensor(16))
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
    parts, table = PUBLIC["nasvit"].make.split(public_state(space), supernet), PUBLIC["nasvit"].make.table(supernet)
    assert set(supernet.shapes) <= set(table) and set(table.values()) <= set(parts)
    assert len(set(table.values())) == len(table)
    left = set(parts) - set(table.values())
    assert [key for key in left if not re.search(PUBLIC["nasvit"].make.expected_leftovers(supernet), key)] == []
    # Only blocks after the first of a stage, and those whose widths coincide in this instance, have idle shortcuts.
    idle = {key for key in left if ".shortcut." in key}
    assert idle == {f"blocks.{number}.shortcut.conv.conv.weight" for number in (0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12)}
    assert len([name for name in table if name.endswith(".running_var")]) == 3 * 17 - 2 + 2  # mb1 has no expansion; stem and head


def test_public_settings_are_the_original() -> None:
    assert PUBLIC["nasvit"].make.settings == NASViTSettings.original()


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


@pytest.mark.parametrize("space", [narrow(), narrow(depth=0.5)], ids=["deep", "shallow"])
def test_masked_equals_sliced_where_token_numbers_differ(space: NASViT) -> None:
    """Outputs, measured statistics and gradients; float32, against the largest entry: logits 1e-5, moments 1e-4, gradients 1e-3."""
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
