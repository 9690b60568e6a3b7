"""Weights trained elsewhere: public names and shapes, what a checkpoint may hold, files of whole supernets, runs that start from them."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import shlex
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from fedloom import config
from fedloom.core.errors import DamagedRun, InvalidArchitecture, InvalidConfig, InvalidData, UnusableFolder
from fedloom.data.readers import read
from fedloom.engine.files import read_arrays
from fedloom.exchange import load_model, load_supernet
from fedloom.exchange.foreign import reshapes
from fedloom.exchange.models import make_supernet
from fedloom.exchange.weights import save_weights, starting_weights
from fedloom.spaces.base import SPACES, ImageShape
from fedloom.spaces.darts import DARTS_V2
from fedloom.spaces.mobilenetv3 import DEPTHS, EXPANSIONS, KERNELS, MobileNetV3Settings
from fedloom.supernets.base import Supernet
from fedloom.supernets.elastic import elastic_kernel
from fedloom.supernets.foreign import PUBLIC
from nets import weights_of
from support import Fedloom, check_refused, flip_last_byte

IMAGE = ImageShape(channels=3, size=8, classes=5)
MERGED = ("7to5_matrix", "relative_position_bias_table")  # public tensors whose first axis is two of ours


def tiny(space: str, image: ImageShape = IMAGE) -> Supernet[Any]:
    return make_supernet(space, SPACES[space].settings.tiny(), image)


def overrides(space: str) -> list[str]:
    return [f"{space}.{key}={json.dumps(value)}" for key, value in asdict(SPACES[space].settings.tiny()).items()]


def public_state(space: str, supernet: Supernet[Any], seed: int = 0) -> dict[str, Tensor]:
    """A state dict in the public naming with random weights, kernel matrices and running statistics."""
    generator = torch.Generator().manual_seed(seed)
    weights, state, sizes = weights_of(supernet, seed), {}, _norm_sizes(supernet)
    for ours, theirs in PUBLIC[space].table(supernet).items():
        if ours.endswith(".running_mean"):
            state[theirs] = 0.3 * torch.randn(sizes[ours], generator=generator)
        elif ours.endswith(".running_var"):
            state[theirs] = 0.5 + torch.rand(sizes[ours], generator=generator)
            state[theirs.replace("running_var", "num_batches_tracked")] = torch.tensor(7)
        elif "#" in theirs:  # NASViT keeps the scales of all depths and token counts in one tensor
            whole, row = theirs.split("#")
            depth, tokens = map(int, row.split(","))
            state.setdefault(whole, torch.zeros(10, 8, len(weights[ours])))[depth, tokens] = weights[ours]
        else:
            state[theirs] = weights[ours].flatten(0, 1) if theirs.endswith(MERGED) else weights[ours]
    return state


def _norm_sizes(supernet: Supernet[Any]) -> dict[str, tuple[int, ...]]:
    """From networks that together use every choice, at its largest width."""
    found: dict[str, tuple[int, ...]] = {}
    sizes = supernet.space.sizes
    for choice in range(sizes.max()):
        with torch.device("meta"):
            network = supernet.network(supernet.space.canonical(np.minimum(choice, sizes - 1)))
        found |= {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    return found


def older(key: str) -> str:
    """The spelling of the released once-for-all checkpoints."""
    place, number, *rest = key.split(".")
    return ".".join([place, number, "mobile_inverted_conv", *rest[1:]]) if place == "blocks" else key


# -- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", PUBLIC)
def test_public_weights_arrive_bit_for_bit(fedloom_: Fedloom, tmp_path: Path, space: str) -> None:
    supernet = tiny(space)
    state = public_state(space, supernet)
    torch.save(state, tmp_path / "theirs.pth")
    outcome = fedloom_("import-weights", space, "theirs.pth", *overrides(space), "--size", 8, "--out", "ours.safetensors")
    counters = sum(key.endswith("num_batches_tracked") for key in state)
    table = PUBLIC[space].table(supernet)
    assert outcome.code == 0 and f"{len(table)} tensors taken" in outcome.out and "unexpected" not in outcome.out
    assert not counters or f"{counters} keys left over as expected: num_batches_tracked" in outcome.out

    loaded, weights, statistics = load_supernet(tmp_path / "ours.safetensors")
    assert loaded.space.settings == supernet.space.settings and loaded.space.image == IMAGE
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == supernet.shapes
    known = weights | {f"{name}.running_mean": mean for name, (mean, _) in statistics.items()}
    known |= {f"{name}.running_var": variance for name, (_, variance) in statistics.items()}
    assert set(known) == set(table)
    for ours, theirs in table.items():
        whole, _, row = theirs.partition("#")
        sent = state[whole][tuple(map(int, row.split(",")))] if row else state[whole]
        assert torch.equal(known[ours].flatten(), sent.flatten()), ours
    assert read_arrays(tmp_path / "ours.safetensors")[1]["source"] == PUBLIC[space].source


@pytest.mark.parametrize("space", PUBLIC)
def test_an_imported_subnet_can_be_exported(fedloom_: Fedloom, tmp_path: Path, space: str) -> None:
    torch.save(public_state(space, tiny(space)), tmp_path / "theirs.pth")
    fedloom_("import-weights", space, "theirs.pth", *overrides(space), "--size", 8, "--out", "ours.safetensors")
    outcome = fedloom_("export", "ours.safetensors", "--architecture", "smallest")
    assert outcome.code == 0 and outcome.out.startswith("ours-smallest.safetensors: ")
    network, facts = load_model(tmp_path / "ours-smallest.safetensors")
    assert facts["classes"] == ["0", "1", "2", "3", "4"] and facts["mean"] == list(PUBLIC[space].mean)

    supernet, weights, statistics = load_supernet(tmp_path / "ours.safetensors")
    smallest = supernet.space.named["smallest"]
    images = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = supernet.forward(images, supernet.take(weights, smallest), smallest, supernet.take_statistics(statistics, smallest))
        assert torch.allclose(network(images), expected, atol=1e-5)
    outcome = fedloom_("export", "ours.safetensors", "--architecture", smallest.id)
    assert outcome.out.startswith(f"ours-{smallest.id.replace(':', '-')}.safetensors: {smallest.id}, ")


def test_a_genotype_names_a_file_that_can_be_written(fedloom_: Fedloom, tmp_path: Path) -> None:
    """Its text is longer than any name of a file, so the file is named after the id of what it means."""
    torch.save(public_state("darts", tiny("darts")), tmp_path / "theirs.pth")
    fedloom_("import-weights", "darts", "theirs.pth", *overrides("darts"), "--size", 8, "--out", "ours.safetensors")
    cell = tiny("darts").space.named["darts_v2"]
    name = f"ours-{cell.id.replace(':', '-')}.safetensors"
    assert len(DARTS_V2) > 400 and len(name) < 100
    outcome = fedloom_("export", "ours.safetensors", "--architecture", DARTS_V2)
    assert outcome.code == 0 and outcome.out.startswith(f"{name}: {cell.id}, ")
    assert fedloom_("export", "ours.safetensors", "--architecture", "darts_v2").out.startswith("ours-darts_v2.safetensors: ")
    assert (tmp_path / name).read_bytes() == (tmp_path / "ours-darts_v2.safetensors").read_bytes()
    outcome = fedloom_("export", "ours.safetensors", "--architecture", "smallest", "--out", "x" * 300)
    check_refused(outcome, UnusableFolder, "File name too long")
    check_refused(fedloom_("draw", DARTS_V2), InvalidConfig, "is not an architecture")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny once-for-all checkpoint."""
    path = tmp_path_factory.mktemp("public") / "ofa.pth"
    torch.save(public_state("mobilenetv3", tiny("mobilenetv3")), path)
    return path


def import_(fedloom_: Fedloom, path: Path | str, *arguments: object) -> Any:
    return fedloom_("import-weights", "mobilenetv3", path, *overrides("mobilenetv3"), "--size", 8, *arguments)


WRAPPINGS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "older names": lambda state: {older(key): tensor for key, tensor in state.items()},
    "nested": lambda state: {"state_dict": state, "epoch": 3, "optimizer": {"lr": 0.1}},
    "twice nested, from several devices": lambda state: {"model": {"state_dict": {f"module.{key}": t for key, t in state.items()}}},
    "double precision": lambda state: {key: t.double() if t.is_floating_point() else t for key, t in state.items()},
    "with the training script's arguments": lambda state: {"model": state, "args": argparse.Namespace(rate=0.1, path=None)},
}


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS)
def test_the_same_weights_in_other_wrappings(fedloom_: Fedloom, checkpoint: Path, tmp_path: Path, wrap: Callable[..., Any]) -> None:
    torch.save(wrap(torch.load(checkpoint)), tmp_path / "wrapped.pth")
    assert import_(fedloom_, checkpoint, "--out", "one.safetensors").code == 0
    assert import_(fedloom_, "wrapped.pth", "--out", "other.safetensors").code == 0
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "other.safetensors").read_bytes()


def test_weights_as_safetensors(fedloom_: Fedloom, checkpoint: Path, tmp_path: Path) -> None:
    save_file(torch.load(checkpoint), tmp_path / "theirs.safetensors")
    assert import_(fedloom_, checkpoint, "--out", "one.safetensors").code == 0
    check_refused(import_(fedloom_, "theirs.safetensors", "--out", "theirs.safetensors"), InvalidConfig, "would be overwritten", "--out")
    assert import_(fedloom_, "theirs.safetensors").code == 0  # SPACE.safetensors if not said
    outcome = fedloom_("export", "mobilenetv3.safetensors", "--architecture", "smallest", "--out", tmp_path / "mobilenetv3.safetensors")
    check_refused(outcome, InvalidConfig, "would be overwritten")
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "mobilenetv3.safetensors").read_bytes()


def test_a_settings_object_of_the_training_script_is_passed_over(
    fedloom_: Fedloom, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The public NASViT code saves its yacs configuration beside the weights; that package is not needed to read them."""
    node = type("CfgNode", (dict,), {"__module__": "yacs.config"})
    monkeypatch.setitem(sys.modules, "yacs", types.ModuleType("yacs"))
    monkeypatch.setitem(sys.modules, "yacs.config", types.ModuleType("yacs.config"))
    sys.modules["yacs.config"].CfgNode = node  # type: ignore[attr-defined]
    configuration = node(RATE=0.1, MODEL=node(NAME="vit"))
    configuration.__dict__["__immutable__"] = True
    torch.save({"model": torch.load(checkpoint), "config": configuration}, tmp_path / "theirs.pth")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert import_(fedloom_, tmp_path / "theirs.pth").code == 0


def test_what_nobody_expected_is_named(fedloom_: Fedloom, checkpoint: Path, tmp_path: Path) -> None:
    torch.save({**torch.load(checkpoint), "teacher.weight": torch.ones(2)}, tmp_path / "theirs.pth")
    assert "\n1 key left over, and unexpected: teacher.weight\n" in import_(fedloom_, "theirs.pth").out


def test_two_operations_leave_the_other_six_over_as_expected(fedloom_: Fedloom, tmp_path: Path) -> None:
    """In the cells that are there; a cell more than that is something else."""
    supernet = tiny("darts")
    state = public_state("darts", supernet)
    stray = {f"{place}.5.op.1.weight": torch.ones(2) for place in ("cells.3._ops.0._ops", "cells.0.more._ops")}
    torch.save(state | stray, tmp_path / "theirs.pth")
    outcome = fedloom_("import-weights", "darts", "theirs.pth", *overrides("darts"), "darts.operations=s2", "--size", 8)
    assert outcome.code == 0 and f"2 keys left over, and unexpected: {', '.join(sorted(stray))}\n" in outcome.out
    taken, *expected, _ = (int(line.split()[0]) for line in outcome.out.splitlines()[1:])
    assert taken < len(PUBLIC["darts"].table(supernet)) and taken + sum(expected) == len(state)


@pytest.mark.parametrize(
    ("one", "other", "fit"),
    [
        ((25, 25), (5, 5, 25), True),
        ((8, 1, 1), (8,), True),
        ((1, 8), (8, 1), True),
        ((), (1,), True),
        ((8, 16), (16, 8), False),
        ((8, 3), (8, 4), False),
    ],
)
def test_shapes_that_hold_the_same_numbers(one: tuple[int, ...], other: tuple[int, ...], fit: bool) -> None:
    assert reshapes(one, other) == reshapes(other, one) == fit


# -- the published definition -----------------------------------------------------------------------


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


def test_every_public_name_of_the_original_instance() -> None:
    """Counted on the public code: 475 entries, 64 of them counters of batches."""
    public = PUBLIC["mobilenetv3"]
    table = public.table(make_supernet("mobilenetv3", public.settings, ImageShape(3, 224, 1000)))
    assert len(table) == len(set(table.values())) == 411
    assert table["stage5.block4.depth.to_five"] == "blocks.20.conv.depth_conv.conv.7to5_matrix"
    assert table["first.project.norm.running_var"] == "blocks.0.conv.point_linear.bn.running_var"
    assert table["stage2.block1.squeeze.restore.bias"] == "blocks.5.conv.depth_conv.se.fc.expand.bias"


def test_the_how_to_page(fedloom_: Fedloom, tmp_path: Path) -> None:
    """Its commands and its snippet, with the original instance at its full size and random weights."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "foreign-weights.md").read_text()
    first, _, _ = re.findall(r"^```console\n(.*?)^```", page, re.MULTILINE | re.DOTALL)  # the second needs a user's own settings
    supernet = make_supernet("mobilenetv3", PUBLIC["mobilenetv3"].settings, ImageShape(3, 224, 1000))
    torch.save({"state_dict": public_state("mobilenetv3", supernet)}, tmp_path / "ofa_mbv3_d234_e346_k357_w1.0")
    for command in first.splitlines():
        assert fedloom_(*shlex.split(command.removeprefix("$ fedloom "))).code == 0, command
    (snippet,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    known: dict[str, Any] = {}
    exec(compile(snippet, "foreign-weights.md", "exec"), known)
    assert known["logits"].shape == (2, 1000) and known["logits"].isfinite().all()
    assert sum(parameter.numel() for parameter in load_model(tmp_path / "mobilenetv3-smallest.safetensors")[0].parameters()) == 3_410_792


# -- refusals ------------------------------------------------------------------------------------------


def without(state: dict[str, Tensor], key: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name != key}


def endless() -> dict[str, Any]:
    nested: dict[str, Any] = {}
    nested["model"] = nested
    return nested


KEY = "blocks.3.conv.point_linear.conv.conv.weight"
STEM, CLASSES = "first_conv.conv.weight", "classifier.linear.weight"
WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], Any], tuple[str, ...]]] = {
    "a missing key": (
        lambda state: without(state, KEY),
        ("not a checkpoint of once-for-all", "it lacks 1 of 411 tensors", KEY, "mobilenetv3.KEY=VALUE"),
    ),
    "another network": (
        lambda state: {"conv1.weight": torch.ones(3)},
        ("not a checkpoint of once-for-all", "it lacks 411 of 411 tensors", "first_conv.conv.weight"),
    ),
    "another shape": (
        lambda state: {**state, KEY: torch.ones(8, 9, 1, 1)},
        (KEY, ": 1 tensor of another shape", "(8, 9, 1, 1)", "mobilenetv3.KEY=VALUE"),
    ),
    "turned axes": (lambda state: {**state, KEY: state[KEY].transpose(0, 1).contiguous()}, (KEY, "another shape")),
    "statistics of another width": (
        lambda state: {**state, "first_conv.bn.running_mean": torch.ones(9)},
        ("first_conv.bn.running_mean", "(9,) where (8,) belongs"),
    ),
    "a number that is none": (lambda state: {**state, KEY: state[KEY] * float("nan")}, (KEY, "not finite")),
    "a number too large": (lambda state: {**state, KEY: state[KEY].double() + 1e300}, (KEY, "not finite")),
    "a negative variance": (
        lambda state: {**state, "first_conv.bn.running_var": -state["first_conv.bn.running_var"]},
        ("first_conv.bn.running_var holds negative variances",),
    ),
    "no dense tensor": (lambda state: {**state, KEY: state[KEY].to_sparse()}, (KEY, "sparse or left out")),
    "numbers left out": (lambda state: {**state, KEY: state[KEY].to("meta")}, (KEY, "sparse or left out")),
    "itself": (lambda state: endless(), ("holds no tensors",)),
    "a classifier without features": (lambda state: {**state, CLASSES: torch.empty(10**9, 0)}, (CLASSES, "(1000000000, 0)")),
    "more classes than there are": (
        lambda state: {**state, CLASSES: state[CLASSES][:1].expand(10**9, -1)},
        (CLASSES, "is for 1000000000 classes; 1 to 100000 are possible"),
    ),
    "no classes": (lambda state: {**state, CLASSES: state[CLASSES][:0]}, (CLASSES, "is for 0 classes")),
    "more channels than there are": (
        lambda state: {**state, STEM: state[STEM][:, :1].expand(-1, 10**8, -1, -1)},
        (STEM, "is for 100000000 channels; 1 to 100000 are possible"),
    ),
    "no channels": (lambda state: {**state, STEM: state[STEM][:, :0]}, (STEM, "is for 0 channels")),
    "whole numbers": (lambda state: {**state, KEY: state[KEY].long()}, (KEY, "holds int64 where floating-point numbers belong")),
    "no tensors": (lambda state: {"epoch": 3}, ("holds no tensors",)),
    "a list": (lambda state: [torch.ones(2)], ("holds no tensors",)),
    "a class of somebody's own": (lambda state: {"model": state, "hook": Path("x")}, ("pathlib", "could run code", "state_dict()")),
}


@pytest.mark.parametrize(("change", "words"), WRONG.values(), ids=WRONG)
def test_a_checkpoint_that_does_not_fit(
    fedloom_: Fedloom, checkpoint: Path, tmp_path: Path, change: Callable[..., Any], words: tuple[str, ...]
) -> None:
    torch.save(change(torch.load(checkpoint)), tmp_path / "theirs.pth")
    check_refused(import_(fedloom_, "theirs.pth"), InvalidData, "theirs.pth", *words)
    assert not (tmp_path / "mobilenetv3.safetensors").exists()


class Attack:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def test_nothing_in_a_checkpoint_is_executed(fedloom_: Fedloom, checkpoint: Path, tmp_path: Path) -> None:
    torch.save({"state_dict": torch.load(checkpoint), "x": Attack()}, tmp_path / "theirs.pth")
    check_refused(import_(fedloom_, "theirs.pth"), InvalidData, "theirs.pth", "system", "could run code")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "theirs.pth is empty. Copy"),
        (b"PK\x03\x04", "theirs.pth is damaged or no weights file: PytorchStreamReader failed"),
        (b"epoch: 3\n", "theirs.pth is damaged or no weights file. Save the state dict alone"),
        (b"no weights at all", "theirs.pth is damaged or no weights file. Save the state dict alone"),
        (bytes(8) + b"{", "theirs.pth is damaged or no weights file: "),
        (b"\x80\x02}q\x00.", "theirs.pth"),
        (pickle.dumps({"x": Attack()}, protocol=4), "theirs.pth is damaged or no weights file. Save the state dict alone"),
    ],
)
def test_a_file_that_holds_no_weights(fedloom_: Fedloom, tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "theirs.pth").write_bytes(content)
    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("always")
        check_refused(import_(fedloom_, "theirs.pth"), InvalidData, words)
    assert remarks == [] and not (tmp_path / "executed").exists()


def test_a_truncated_checkpoint(fedloom_: Fedloom, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs.pth").write_bytes(checkpoint.read_bytes()[:-5000])
    check_refused(import_(fedloom_, "theirs.pth"), InvalidData, "theirs.pth", "damaged or no weights file")


def test_wrong_arguments(fedloom_: Fedloom, checkpoint: Path, tmp_path: Path) -> None:
    check_refused(import_(fedloom_, "nothing.pth"), InvalidData, "nothing.pth", "No such file")
    check_refused(import_(fedloom_, "."), InvalidData, "Is a directory")
    check_refused(fedloom_("import-weights", "mobilenet", checkpoint), InvalidConfig, "Did you mean 'mobilenetv3'?")
    check_refused(fedloom_("import-weights", "mobilenetv3", checkpoint, "rounds=2"), InvalidConfig, "'rounds=2'", "mobilenetv3.KEY=VALUE")
    check_refused(fedloom_("import-weights", "mobilenetv3", checkpoint, "mobilenetv3.widt=2"), InvalidConfig, "Did you mean 'width'?")
    check_refused(fedloom_("space", "darts", "mobilenetv3.width=2"), InvalidConfig, "'mobilenetv3.width=2'", "darts.KEY=VALUE")
    words = ("The public network has mobilenetv3.norm=batch", "mobilenetv3.norm=group")
    check_refused(fedloom_("import-weights", "mobilenetv3", checkpoint, "mobilenetv3.norm=group"), InvalidConfig, *words)
    assert import_(fedloom_, checkpoint).code == 0
    check_refused(import_(fedloom_, "mobilenetv3.safetensors", "--out", "x.safetensors"), InvalidData, "a file of Fedloom already")
    outcome = fedloom_("export", "mobilenetv3.safetensors", "--architecture", "smalest")
    check_refused(outcome, InvalidArchitecture, "Did you mean 'smallest'?")
    check_refused(fedloom_("export", checkpoint, "--architecture", "smallest"), InvalidData, "no weights file of Fedloom", "import-weights")
    for more in ((), ("--client", "client-000", "--architecture", "smallest")):
        check_refused(fedloom_("export", "mobilenetv3.safetensors", *more), InvalidConfig, "--client NAME", "--architecture NAME")
    flip_last_byte(tmp_path / "mobilenetv3.safetensors")
    check_refused(fedloom_("export", "mobilenetv3.safetensors", "--architecture", "smallest"), InvalidData, "damaged")


# -- runs that start from weights --------------------------------------------------------------------------


@pytest.fixture
def weights_file(fedloom_: Fedloom, tmp_path: Path) -> Callable[..., Path]:
    """A weights file for a run of tests/tiny.toml, of so many classes and channels."""

    def make(classes: int = 10, channels: int = 1, seed: int = 0) -> Path:
        settings = MobileNetV3Settings(width=0.05, strides=(2, 2, 1, 1, 1))
        supernet = make_supernet("mobilenetv3", settings, ImageShape(channels, 8, classes))
        torch.save(public_state("mobilenetv3", supernet, seed), tmp_path / "theirs.pth")
        given = ["mobilenetv3.width=0.05", "mobilenetv3.strides=[2,2,1,1,1]", "mobilenetv3.stem_stride=1"]
        assert fedloom_("import-weights", "mobilenetv3", "theirs.pth", *given, "--size", 8, "--out", "start.safetensors").code == 0
        (tmp_path / "theirs.pth").unlink()
        return tmp_path / "start.safetensors"

    return make


STILL = ("training.rate=1e-12", "training.finetune_epochs=0", "run.folder=mine")  # training changes nothing


@pytest.mark.parametrize("method", ["fedavg", "perfedsde"])
def test_a_run_starts_from_weights(
    fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, weights_file: Callable[..., Path], method: str
) -> None:
    supernet, weights, _ = load_supernet(weights_file())
    outcome = fedloom_("run", tiny_file, f"method={method}", "weights=start.safetensors", *STILL)
    assert outcome.code == 0 and f"It began with the weights in {tmp_path}/start.safetensors; they are for images " in outcome.out
    assert "from the weights in start.safetensors" in outcome.out and "afresh" not in outcome.out
    state, _ = read_arrays(tmp_path / "mine" / "state" / "server.safetensors")
    begun = weights if method == "perfedsde" else supernet.plain(weights, supernet.space.named["smallest"])
    saved = {name.removeprefix("weights/"): array for name, array in state.items() if name.startswith("weights/")}
    assert set(saved) == set(begun)
    assert all(np.allclose(saved[name], tensor, atol=1e-7) for name, tensor in begun.items())


def test_a_classifier_of_other_classes_begins_afresh(
    fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, weights_file: Callable[..., Path]
) -> None:
    _, weights, _ = load_supernet(weights_file(classes=4))
    outcome = fedloom_("run", tiny_file, "method=perfedsde", "weights=start.safetensors", *STILL)
    remark = "their classifier has 4 classes, this run's 10, so that layer begins afresh"
    assert outcome.code == 0 and remark in outcome.out
    assert remark in json.loads((tmp_path / "mine" / "result.json").read_text())["environment"]["weights"]
    state, _ = read_arrays(tmp_path / "mine" / "state" / "server.safetensors")
    assert state["weights/classifier.weight"].shape[0] == 10
    assert all(np.allclose(state[f"weights/{name}"], t, atol=1e-7) for name, t in weights.items() if not name.startswith("classifier."))


def test_another_normalisation_is_remarked_on(
    fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, weights_file: Callable[..., Path]
) -> None:
    """Only where it differs, by a grey level or more, and only if the file tells."""
    supernet, weights, _ = load_supernet(weights_file())
    digits = read(config.load(str(tiny_file)).data)
    (mean,), (std,) = digits.mean, digits.std
    near = {"mean": [mean + 1e-4], "std": [std - 1e-4]}
    for facts, remark in (
        (near, ""),
        ({}, ""),
        ({**near, "mean": None}, ""),
        ({**near, "std": [0.125]}, f"; they are for images normalised by mean {mean + 1e-4:.3f} and std 0.125, "),
        ({**near, "mean": [0.75]}, f"; they are for images normalised by mean 0.750 and std {std - 1e-4:.3f}, "),
    ):
        save_weights(tmp_path / "start.safetensors", supernet, weights, facts)
        found = starting_weights(tmp_path / "start.safetensors", supernet, digits.mean, digits.std)[1]
        assert found == (remark and f"{remark}this run's are by mean {mean:.3f} and std {std:.3f}")
    assert fedloom_("run", tiny_file, "weights=start.safetensors", *STILL).code == 0
    assert json.loads((tmp_path / "mine" / "result.json").read_text())["environment"]["weights"].endswith(found)


@pytest.mark.parametrize(
    ("space", "key", "there", "here"), [("mobilenetv3", "norm", "batch", "group"), ("darts", "operations", "full", "s2")]
)
def test_weights_for_another_choice_are_refused(
    fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, space: str, key: str, there: str, here: str
) -> None:
    """Batch and group normalisation have the same names and shapes, and mean different things."""
    supernet = make_supernet(space, config.load(str(tiny_file)).components[space], ImageShape(1, 8, 10))
    assert getattr(supernet.space.settings, key) == there
    save_weights(tmp_path / "start.safetensors", supernet, supernet.initial(0), {})
    for method in ("perfedsde", "fedavg"):
        given = (f"space={space}", f"method={method}", "weights=start.safetensors", f"{space}.{key}={here}", "run.folder=mine")
        words = (f"holds weights for {space}.{key}={there}", f"this run has {space}.{key}={here}", f"Set {space}.{key}={there}")
        check_refused(fedloom_("run", tiny_file, *given), InvalidConfig, "start.safetensors", *words)
        assert not (tmp_path / "mine").exists()


def test_a_resume_needs_the_weights_file_no_more(
    fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, weights_file: Callable[..., Path]
) -> None:
    """``local`` reads its initial weights at every client: the hardest case."""
    start = weights_file()
    assert fedloom_("run", tiny_file, "method=local", "weights=start.safetensors", "run.folder=mine").code == 0
    mine = tmp_path / "mine"
    models = {path: path.read_bytes() for path in mine.glob("clients/*/model.safetensors")}
    start.unlink()
    (mine / "result.json").unlink()
    (mine / "ledger.jsonl").unlink()
    for path in models:
        path.unlink()
    assert fedloom_("resume", "mine").code == 0
    assert len(models) == 3 and all(path.read_bytes() == content for path, content in models.items())
    (mine / "state" / "weights.safetensors").unlink()
    check_refused(fedloom_("resume", "mine"), DamagedRun, "weights.safetensors is missing")


def test_nasvit_is_imported_for_the_instance_of_the_run(fedloom_: Fedloom, tmp_path: Path) -> None:
    """The refusal's command is the how-to page's, and its outcome fits."""
    public = PUBLIC["nasvit"]
    torch.save(public_state("nasvit", make_supernet("nasvit", public.settings, ImageShape(3, 224, 10))), tmp_path / "theirs.pth")
    assert fedloom_("import-weights", "nasvit", "theirs.pth").code == 0
    run = make_supernet("nasvit", SPACES["nasvit"].settings(), ImageShape(3, 32, 10))
    with pytest.raises(InvalidConfig, match=r"here\. Weights of nasvit are imported for the instance of the run: fedloom") as refusal:
        starting_weights(tmp_path / "nasvit.safetensors", run, public.mean, public.std)
    command = str(refusal.value).rpartition(": ")[2]
    assert f"\n$ {command}\n" in (Path(__file__).parents[2] / "docs" / "how-to" / "foreign-weights.md").read_text()
    assert fedloom_(*shlex.split(command.removeprefix("fedloom ").replace("FILE", "theirs.pth"))).code == 0
    weights, remarks = starting_weights(tmp_path / "nasvit.safetensors", run, public.mean, public.std)
    assert set(weights) == set(run.shapes) and remarks == ""
    narrow = make_supernet("nasvit", SPACES["nasvit"].settings(width=0.5, strides=(1, 2, 2, 1, 2, 2, 2)), ImageShape(3, 32, 10))
    with pytest.raises(InvalidConfig, match=r"Give the run the settings .*, nasvit\.width=1\.0 .* 'nasvit\.strides=\[1,2,2,1,2,1,2\]' "):
        starting_weights(tmp_path / "nasvit.safetensors", narrow, public.mean, public.std)


def test_weights_that_do_not_fit_a_run(fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, weights_file: Callable[..., Path]) -> None:
    def refused(kind: type[InvalidConfig] | type[InvalidData], settings: tuple[str, ...], *words: str) -> None:
        check_refused(fedloom_("run", tiny_file, *settings, "run.folder=mine"), kind, *words)
        assert not (tmp_path / "mine").exists()

    weights_file()
    refused(InvalidConfig, ("weights=start.safetensors", "mobilenetv3.width=0.2"), "does not fit", "mobilenetv3.width=0.05")
    refused(InvalidData, ("weights=nothing.safetensors",), "nothing.safetensors", "No such file")
    refused(InvalidData, (f"weights={tiny_file}",), "no weights file of Fedloom", "import-weights")
    weights_file(channels=3)
    refused(InvalidConfig, ("weights=start.safetensors",), "stem.conv.weight", "(8, 3, 3, 3) there and (8, 1, 3, 3) here", "3 channels")
    others = [entry.name for entry in SPACES if entry.name != "mobilenetv3"]
    for other in others[:1]:
        refused(InvalidConfig, ("weights=start.safetensors", f"space={other}", "method=fedavg"), "Set space=mobilenetv3")
