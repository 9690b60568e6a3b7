"""Generators in files: the shipped ones, and those that ``fedloom pretrain`` writes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedloom
from fedloom.core.errors import DamagedRun, InvalidConfig, InvalidData, one_line
from fedloom.files import read_arrays, write_arrays
from fedloom.generator.features import FeatureExtractor, SmallFeatures, frozen_extractor, load_features
from fedloom.generator.generator import AnyGenerator, Generator
from fedloom.generator.paper.generator import PaperGenerator
from fedloom.generator.tokens import Tokens
from fedloom.spaces.base import SearchSpace
from fedloom.spaces.budget import Bounded

MODELS: dict[str, type[AnyGenerator]] = {kind.model: kind for kind in (Generator, PaperGenerator)}
GENERATOR, FEATURES = "fedloom.generator/1", "fedloom.features/1"
SIZES = ("layers", "width", "heads", "feed", "graph_layers", "graph_width")  # settings that decide how large networks are
LARGEST = 4096  # of these
FEATURES_NAMED = "perfedsde.features=FILE in a run, --features FILE of `fedloom generate`"


def shipped(name: str) -> Path:
    """Where a file that comes with the package lies, whether it exists or not."""
    return Path(str(resources.files("fedloom") / "generator" / "weights" / f"{name}.safetensors"))


# -- writing -------------------------------------------------------------------------
def arrays_of(module: nn.Module, prefix: str = "") -> dict[str, np.ndarray]:
    return {f"{prefix}{name}": tensor.detach().float().cpu().numpy() for name, tensor in module.state_dict().items()}


def save_generator(path: Path, generator: AnyGenerator, settings: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """``settings``: those that the model's networks are built from again, by name (denoiser and predictor, or paper)."""
    arrays = arrays_of(generator.denoiser, "denoiser.")
    if generator.predictor is not None and generator.extractor is not None:
        arrays |= arrays_of(generator.predictor, "predictor.")
        extractor = generator.extractor
        facts = {**facts, "features": {"name": extractor.name, "size": extractor.size, "digest": digest_of(extractor.network)}}
    described = {"format": GENERATOR, "fedloom": fedloom.__version__, "model": generator.model, **generator.tokens.signature}
    write_arrays(
        path,
        arrays,
        {**described, "strength": generator.strength, "settings": {name: asdict(value) for name, value in settings.items()}, **facts},
    )


# -- reading ---------------------------------------------------------------------------
def load_generator(
    space: SearchSpace, file: str, features: str, device: torch.device, sampler: str = "", steps: int = 0, guided: bool = True
) -> AnyGenerator:
    """The generator of a space. file: "" is the shipped one; features: "" are those beside the file or shipped; ResNet-18 must be named.

    sampler, steps: other than the generator's own ("" and 0). guided: false leaves the predictor and its image features out.
    """
    space = space.whole if isinstance(space, Bounded) else space
    path = Path(file) if file else shipped(space.name)
    if not path.is_file():
        cure = f"Train one with `fedloom pretrain {space.name}`; a run can do without one (perfedsde.generator=evolution)"
        what = f"There is no generator file {path}" if file else f"No generator for {space.name} comes with Fedloom"
        raise InvalidConfig(f"{what}. {cure}", path=str(path))
    arrays, facts = read_described(path, GENERATOR, "fedloom pretrain")
    tokens = Tokens(space)
    if any(facts.get(key) != value for key, value in tokens.signature.items()):
        choices = facts.get("choices")
        theirs = f"{facts.get('space')} with {len(choices) if isinstance(choices, list) else 'no'} genes"
        cure = f"Train one for these genes with `fedloom pretrain {space.name}`; a run can do without one (perfedsde.generator=evolution)"
        what = f"{path} is a generator for {theirs}, but this {space.name} has other genes, choices or another order of choices"
        raise InvalidConfig(f"{what}. {cure}", path=str(path))
    model = str(facts.get("model", Generator.model))
    if model not in MODELS:
        raise InvalidData(f"{path} holds a generator named {model!r}, which this version does not know. Known: {', '.join(MODELS)}")
    kind = MODELS[model]
    try:
        extractor = find_features(facts["features"], features, path, device) if guided and "features" in facts else None
        with torch.random.fork_rng(devices=[]):  # new networks draw weights, which the file's replace
            _check_sizes(facts["settings"], arrays, extractor is not None)
            denoiser, predictor = kind.networks(tokens, facts["settings"], extractor.size if extractor else 0)
        denoiser = loaded(denoiser, arrays, "denoiser.", device)
        predictor = loaded(predictor, arrays, "predictor.", device) if predictor is not None else None
        generator = kind(tokens, denoiser, predictor, extractor, float(facts.get("strength", kind.strength)), facts=facts)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError, ArithmeticError) as error:
        raise InvalidData(f"{path} does not fit its own description: {one_line(error, 200)}", path=str(path)) from error
    return generator.sampled_by(sampler, steps)


def _check_sizes(settings: Mapping[str, Mapping[str, Any]], arrays: Mapping[str, np.ndarray], guided: bool) -> None:
    """ValueError for settings whose networks cannot be in the file: they are refused before they fill the memory."""
    numbers = sum(array.size for array in arrays.values())
    for table in settings.values():
        for name in SIZES:
            if name in table and not (type(table[name]) is int and 1 <= table[name] <= LARGEST):
                raise ValueError(f"{name} is {table[name]!r}, not a whole number from 1 to {LARGEST}")
        graph = (table["graph_layers"] - 1) * table["graph_width"] ** 2 if guided and "graph_layers" in table else 0
        if max(table.get("layers", 0) * table["width"] ** 2, graph) > numbers:
            raise ValueError("its settings describe a network larger than the file")


def find_features(wanted: Mapping[str, Any], given: str, path: Path, device: torch.device) -> FeatureExtractor:
    """The extractor a generator was trained with: the user's file, the one that ``fedloom pretrain`` left beside it, or the shipped one."""
    name, digest = wanted["name"], wanted.get("digest")
    if given:
        extractor = load_features(given, device)
        if extractor.name != name:
            raise InvalidConfig(f"{path} was trained with image features of {name}, but {given} holds {extractor.name}", path=given)
        if digest not in (None, digest_of(extractor.network)):
            raise InvalidConfig(f"{path} was trained with other image features than those of {given}: name that file, or none", path=given)
        return extractor
    if name != SmallFeatures.name:
        raise InvalidConfig(
            f"{path} was trained with image features of {name}. Name the file of its weights ({FEATURES_NAMED})", path=str(path)
        )
    for place in (path.parent / "features.safetensors", shipped("features")):
        if place.is_file():
            extractor = read_features(place, device)
            if digest in (None, digest_of(extractor.network)):
                return extractor
    cure = f"Put the features.safetensors that was trained with it into its folder, or name it ({FEATURES_NAMED})"
    raise InvalidConfig(f"{path} was trained with image features that neither lie beside it nor come with Fedloom. {cure}", path=str(path))


def digest_of(network: nn.Module) -> str:
    """What other weights would not have."""
    return tensor_digest({name: tensor for name, tensor in network.state_dict().items() if tensor.is_floating_point()})


def tensor_digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def read_features(path: Path, device: torch.device) -> FeatureExtractor:
    arrays, _ = read_described(path, FEATURES, "fedloom pretrain")
    with torch.random.fork_rng(devices=[]):  # a new network draws weights, which the file's replace
        network = SmallFeatures()
    return frozen_extractor(network, {name: torch.from_numpy(array) for name, array in arrays.items()}, str(path), device)


def read_described(path: Path, kind: str, writer: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and description of a file of this kind."""
    try:
        arrays, facts = read_arrays(path)
    except DamagedRun as error:
        raise InvalidData(f"{path} is missing, damaged or no file of Fedloom. `{writer}` writes one", path=str(path)) from error
    if facts.get("format") != kind:
        stage = f"the stage {facts['stage']} of a pretraining" if "stage" in facts else "something else"
        other = facts.get("format", stage)
        raise InvalidData(f"{path} is {other}, not {kind}. `{writer}` writes one", path=str(path))
    return arrays, facts


def loaded(module: nn.Module, arrays: Mapping[str, np.ndarray], prefix: str, device: torch.device) -> Any:
    """The module with its weights from a file, frozen."""
    state: dict[str, Tensor] = {n.removeprefix(prefix): torch.from_numpy(a) for n, a in arrays.items() if n.startswith(prefix)}
    module.load_state_dict(state)
    if not all(tensor.isfinite().all() for tensor in state.values()):
        raise ValueError("some of its weights are not finite numbers")
    return module.to(device).eval().requires_grad_(False)
