"""``fedloom pretrain``: from a search space and public images to a generator, in stages that each leave a file.

denoiser  architectures sampled from the space, no labels (500,000)
features  a small image network on the public images, unless ResNet-18 is given
supernet  shared weights of the space, trained on the public images
labels    accuracy of many architectures on many class subsets of them
predictor accuracy from architecture and data
With ``model=paper`` the first and the last are paper_score and paper_predictor, the papers' networks (``paper/``).
A stage whose file is there is not repeated; supernet and labels also go on from where they stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

import fedloom
from fedloom.core.errors import DamagedRun, InvalidConfig, UnusableFolder
from fedloom.core.seeds import derive_seed, rng
from fedloom.core.settings import setting
from fedloom.files import claimed, read_arrays, write_arrays, write_file
from fedloom.generator.denoiser import Denoiser, DenoiserSettings, train_denoiser
from fedloom.generator.feature_training import FeatureSettings, train_features
from fedloom.generator.features import FeatureExtractor, load_features
from fedloom.generator.files import FEATURES, arrays_of, digest_of, loaded, read_features, save_generator, tensor_digest
from fedloom.generator.generator import STRENGTH, AnyGenerator, Generator
from fedloom.generator.labels import (
    LabelSettings,
    SupernetSettings,
    different_architectures,
    equally_hard,
    one_accuracy,
    score_architectures,
    task_measure,
    train_proxy_supernet,
)
from fedloom.generator.paper import training as paper
from fedloom.generator.paper.generator import PaperGenerator
from fedloom.generator.paper.predictor import PaperTaskPredictor
from fedloom.generator.paper.score import PREDICTOR_ONLY, SAMPLING_ONLY, SCORE_ONLY, PaperScoreNetwork, PaperSettings
from fedloom.generator.predictor import Predictor, PredictorSettings, train_predictor
from fedloom.generator.proxy import Proxy, ProxySettings, Task, class_likeness, draw_tasks, padded, task_images
from fedloom.generator.quality import DRAWN, predictor_quality, sampler_quality
from fedloom.generator.tokens import Tokens
from fedloom.spaces.base import SearchSpace
from fedloom.supernets.base import Supernet

Progress = Callable[[str, int, int, str], None]  # (stage, done, of how many, remark)
Network = TypeVar("Network", bound=nn.Module)
BLOCK = 256  # labelled architectures that see the same images; the file is saved after each block
FEWEST_PER_CONDITION = 8  # labelled architectures
RATES = {  # of the stages that train a network
    "denoiser": "denoiser.rate",
    "predictor": "predictor.rate",
    "paper_score": "paper.score_rate",
    "paper_predictor": "paper.predictor_rate",
}
TEST_EVERY = 20  # one of so many labelled architectures is not learned from


@dataclass(frozen=True)
class PretrainSettings:
    seed: int = setting(0, "seed of every random draw; which images and classes are held out depends on the data alone", low=0)
    model: str = setting("fast", "what to train: the fast generator, or the papers' slow one as a reference", choices=("fast", "paper"))
    guided: bool = setting(True, "also train a predictor; without one the generator cannot be guided by images")
    strength: float = setting(STRENGTH, "strength of guidance that the fast generator's file recommends", low=0)
    denoiser: DenoiserSettings = field(default_factory=DenoiserSettings)
    features: FeatureSettings = field(default_factory=FeatureSettings)
    proxy: ProxySettings = field(default_factory=ProxySettings)
    supernet: SupernetSettings = field(default_factory=SupernetSettings)
    labels: LabelSettings = field(default_factory=LabelSettings)
    predictor: PredictorSettings = field(default_factory=PredictorSettings)
    paper: PaperSettings = field(default_factory=PaperSettings)


@dataclass(frozen=True)
class Labels:
    choices: np.ndarray  # (architectures, genes)
    accuracies: Tensor  # (architectures, tasks + held-out tasks), nan where an architecture saw other conditions than a task's
    tasks: list[Task]  # the predictor's, then the held-out ones
    shown: int  # how many of the tasks are the predictor's
    digest: str  # of what was measured, before it was made equally hard: the same on every device

    @property
    def learned(self) -> tuple[np.ndarray, Tensor]:
        """Architectures and accuracies that a predictor learns from."""
        return self.choices[~self._test], self.accuracies[~self._test, : self.shown]

    @property
    def tested(self) -> tuple[np.ndarray, Tensor]:
        """The other architectures, which test it, on all tasks."""
        return self.choices[self._test], self.accuracies[self._test]

    @property
    def _test(self) -> np.ndarray:
        """(architectures,) bool: some of every block, so that they saw all images and conditions; at least two."""
        numbers = np.arange(len(self.choices))
        few = len(numbers) < 2 * TEST_EVERY
        return numbers >= len(numbers) - 2 if few else numbers % TEST_EVERY == TEST_EVERY - 1


class Pretraining:
    """The stages of one space in one folder."""

    def __init__(self, space: SearchSpace, settings: PretrainSettings, folder: Path, device: torch.device, progress: Progress) -> None:
        self.space, self.settings, self.folder, self.device, self.progress = space, settings, folder, device, progress
        self.tokens = Tokens(space)
        conditions = len(settings.proxy.conditions)
        fewest = FEWEST_PER_CONDITION * conditions
        if settings.guided and settings.labels.architectures < fewest:
            what = f"labels.architectures is {settings.labels.architectures}, too few to see {conditions} conditions"
            raise InvalidConfig(f"{what}. Label at least {fewest}, or name fewer in proxy.conditions", key="labels.architectures")
        if settings.guided and (there := len(different_architectures(space, fewest, settings.seed))) < fewest:
            what = f"The space {space.name} has {there} architectures, too few to learn from in {conditions} conditions"
            raise InvalidConfig(f"{what}: that takes {fewest}. Name fewer in proxy.conditions, or set guided=false")
        self.seconds: dict[str, float] = {}

    # -- stages ------------------------------------------------------------------
    def denoiser(self) -> Denoiser:
        settings = self.settings.denoiser

        def train(progress: Callable[[int, float], None]) -> Denoiser:
            seed = derive_seed(self.settings.seed, "denoiser")
            return train_denoiser(self.tokens, self.training_architectures(), settings, seed, self.device, progress)

        return self._network("denoiser", asdict(settings), lambda: Denoiser(self.tokens, settings), train, settings.steps)

    def paper_score(self) -> PaperScoreNetwork:
        settings, tokens = self.settings.paper, self.tokens
        graph = (tokens.mask, tokens.follows, tokens.places)

        def train(progress: Callable[[int, float], None]) -> PaperScoreNetwork:
            data = tokens.one_hot(tokens.encode(self.training_architectures())).to(torch.int8)
            return paper.train_score(*graph, data, settings, derive_seed(self.settings.seed, "paper_score"), self.device, progress)

        made_by = {**_without(settings, PREDICTOR_ONLY), "architectures": self.settings.denoiser.architectures}
        return self._network("paper_score", made_by, lambda: PaperScoreNetwork(*graph, settings), train, settings.score_steps)

    def training_architectures(self) -> np.ndarray:
        """(architectures, genes) what the denoiser learns from."""
        return self.space.sample_many(rng(self.settings.seed, "architectures"), self.settings.denoiser.architectures)

    def features(self, proxy: Proxy) -> FeatureExtractor:
        settings = self.settings.features
        if settings.file:
            return load_features(settings.file, self.device)
        key = self._key("features", {**asdict(settings), "data": proxy.digest})
        if self._read("features", key):
            self.progress("features", 1, 1, "found")
            return read_features(self.folder / "features.safetensors", self.device)
        start, seed = time.perf_counter(), derive_seed(self.settings.seed, "features")
        network = train_features(proxy, settings, seed, lambda epoch, note: self.progress("features", epoch, settings.epochs, note))
        _check_finite("features", arrays_of(network), "features.rate")
        self._write("features", arrays_of(network), {"format": FEATURES, "fedloom": fedloom.__version__, **key}, start)
        return FeatureExtractor(network)

    def supernet(self, supernet: Supernet[Any], proxy: Proxy) -> dict[str, Tensor]:
        settings = self.settings.supernet.suited_to(supernet)
        key = self._key(
            "supernet",
            {
                **asdict(settings),
                "conditions": self.settings.proxy.conditions,
                "data": proxy.digest,
                "image": asdict(proxy.image),
                "space": asdict(supernet.space.settings),
                "values": [gene.values for gene in supernet.space.genes],
            },
        )
        known = self._read("supernet", key)
        done, spent = 0, 0.0
        weights = {name: tensor.to(self.device) for name, tensor in supernet.initial(derive_seed(self.settings.seed, "supernet")).items()}
        if known:
            arrays, facts = known
            done, spent = int(facts["epochs_done"]), float(facts["seconds"])
            weights = {name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()}
            self.progress("supernet", done, settings.epochs, "found")
        start = time.perf_counter() - spent
        conditions, seed = self.settings.proxy.conditions, self.settings.seed
        for epoch, trained in train_proxy_supernet(supernet, proxy, conditions, settings, weights, done, seed):
            weights = trained
            arrays = {name: tensor.cpu().numpy() for name, tensor in weights.items()}
            _check_finite("supernet", arrays, "supernet.rate")
            reached = one_accuracy(supernet, weights, proxy, rng(seed, "a look", epoch))
            self.progress("supernet", epoch, settings.epochs, f"accuracy of a subnet {reached:.3f}")
            self._write("supernet", arrays, {**key, "epochs_done": epoch}, start)
        return weights

    def labels(self, supernet: Supernet[Any], weights: Mapping[str, Tensor], proxy: Proxy, extractor: FeatureExtractor) -> Labels:
        settings, wanted = self.settings.labels, self.settings.proxy
        choices = different_architectures(self.space, settings.architectures, self.settings.seed)
        scored = tensor_digest({"images": proxy.scoring})
        made_by = {**asdict(settings), **asdict(wanted), "supernet": tensor_digest(weights), "data": scored}
        key = self._key("labels", made_by)
        known = self._read("labels", key)
        # Which classes look alike depends on rounding, which differs between devices: tasks are drawn once and kept.
        tasks = _kept_tasks(known[0], wanted) if known else self._draw_tasks(proxy, extractor)
        parts = [part for part in proxy.scoring.split(settings.images, 1) if part.shape[1] == settings.images] or [proxy.scoring]
        seen = [(condition, part) for part in parts for condition in wanted.conditions]  # by one block of architectures after the other
        rows: list[np.ndarray] = [] if known is None else list(known[0]["accuracies"])
        start = time.perf_counter() - (float(known[1]["seconds"]) if known else 0.0)
        if rows:
            self.progress("labels", len(rows), len(choices), "found")
        blocks = _blocks(len(choices), max(1, min(BLOCK, len(choices) // len(wanted.conditions))))  # every condition gets one
        part_of = blocks % len(seen)
        while len(rows) < len(choices):
            end = int(np.searchsorted(blocks, blocks[len(rows)], "right"))
            block = self.tokens.architectures(choices[len(rows) : end])
            condition, images = seen[part_of[len(rows)]]
            measure = task_measure(tasks, condition, self.device)
            fresh = torch.stack(list(score_architectures(supernet, weights, proxy, block, images, measure, settings, condition)))
            rows += list(fresh.half().cpu().numpy())
            self.progress("labels", len(rows), len(choices), f"mean accuracy {np.nanmean(rows[-1]):.3f} ({condition})")
            kept = {"accuracies": np.stack(rows), "choices": choices[: len(rows)].astype(self.space.compact)}
            kept |= {"tasks": _padded(tasks), "conditions": np.array([wanted.conditions.index(task.condition) for task in tasks])}
            self._write("labels", kept, key, start)
        measured = torch.from_numpy(np.stack(rows))
        accuracies = equally_hard(measured.float().to(self.device), part_of)
        digest = tensor_digest({"accuracies": measured, "tasks": torch.from_numpy(_padded(tasks))})
        return Labels(choices, accuracies, tasks, wanted.tasks, digest)

    def _draw_tasks(self, proxy: Proxy, extractor: FeatureExtractor) -> list[Task]:
        """The predictor's, then the held-out ones."""
        wanted, draw = self.settings.proxy, rng(self.settings.seed, "tasks")
        likeness = class_likeness(extractor(proxy.train.images), proxy.train.labels, proxy.image.classes)
        shown = draw_tasks(wanted, proxy.shown, wanted.tasks, likeness, draw)
        return shown + draw_tasks(wanted, proxy.held_out, wanted.held_out_tasks, likeness, draw)

    def predictor(self, denoiser: Denoiser, labels: Labels, proxy: Proxy, extractor: FeatureExtractor) -> Predictor:
        settings = self.settings.predictor

        def train(progress: Callable[[int, float], None]) -> Predictor:
            choices, accuracies = labels.learned
            return train_predictor(
                self.tokens,
                denoiser,
                self.tokens.encode(choices).to(self.device),
                accuracies,
                task_images(proxy, extractor, labels.tasks),
                extractor.size,
                settings,
                derive_seed(self.settings.seed, "predictor"),
                progress,
            )

        made_by = {**asdict(settings), "denoiser": digest_of(denoiser), **_learned_from(labels, extractor)}
        return self._network("predictor", made_by, lambda: Predictor(self.tokens, extractor.size, settings), train, settings.steps)

    def paper_predictor(self, labels: Labels, proxy: Proxy, extractor: FeatureExtractor) -> PaperTaskPredictor:
        settings, tokens = self.settings.paper, self.tokens
        graph = (tokens.mask, tokens.follows)

        def train(progress: Callable[[int, float], None]) -> PaperTaskPredictor:
            choices, accuracies = labels.learned
            return paper.train_predictor(
                *graph,
                tokens.one_hot(tokens.encode(choices)),
                accuracies,
                task_images(proxy, extractor, labels.tasks),
                extractor.size,
                settings,
                derive_seed(self.settings.seed, "paper_predictor"),
                self.device,
                progress,
            )

        made_by = {**_without(settings, SCORE_ONLY), **_learned_from(labels, extractor)}
        network = lambda: PaperTaskPredictor(*graph, extractor.size, settings)  # noqa: E731
        return self._network("paper_predictor", made_by, network, train, settings.predictor_steps)

    # -- all of them -----------------------------------------------------------------
    def run(self, supernet_of: Callable[[Proxy], Supernet[Any]], proxy: Proxy | None) -> AnyGenerator:
        """The generator, also written as ``result_file`` says, with its card beside it."""
        settings = self.settings
        with claimed(self.folder):
            self._refuse_to_replace()
            if settings.guided and settings.features.file:
                load_features(settings.features.file, self.device)  # a wrong file shows before hours of training
            return self._all_stages(supernet_of, proxy)

    def _refuse_to_replace(self) -> None:
        """An unguided generator does not take the place of a guided one."""
        file = result_file(self.folder, self.settings.model)
        if not self.settings.guided and file.exists() and "features" in self._read_file(file)[1]:
            raise UnusableFolder(f"{file} is guided, and guided=false would replace it by one that is not. Choose another --folder")

    def _all_stages(self, supernet_of: Callable[[Proxy], Supernet[Any]], proxy: Proxy | None) -> AnyGenerator:
        settings = self.settings
        generator: Generator | PaperGenerator
        if settings.model == PaperGenerator.model:
            generator = PaperGenerator(self.tokens, self.paper_score(), strength=settings.paper.strength)
        else:
            generator = Generator(self.tokens, self.denoiser(), strength=settings.strength)
        card: dict[str, Any] = {"model": generator.model}
        if settings.guided and proxy is not None:
            extractor = self.features(proxy)
            supernet = supernet_of(proxy)
            labels = self.labels(supernet, self.supernet(supernet, proxy), proxy, extractor)
            if isinstance(generator, PaperGenerator):
                generator = replace(generator, predictor=self.paper_predictor(labels, proxy, extractor), extractor=extractor)
            else:
                generator = replace(generator, predictor=self.predictor(generator.denoiser, labels, proxy, extractor), extractor=extractor)
            card |= predictor_card(generator, labels, proxy)
        self.progress("quality", 0, 1, "")
        drawn = DRAWN if generator.sampler.startswith("dpm") else DRAWN // 20  # many steps take long
        card |= sampler_quality(generator, self.training_architectures(), settings.seed, drawn)
        seconds = {stage: round(spent, 1) for stage, spent in self.seconds.items()}
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        facts = {"card": {**card, "seconds": seconds, "device": device, "data": proxy.name if proxy else ""}}
        self.progress("quality", 1, 1, "")
        networks = {"denoiser": settings.denoiser, "predictor": settings.predictor, "paper": settings.paper}
        used = {name: value for name, value in networks.items() if (name == "paper") == isinstance(generator, PaperGenerator)}
        save_generator(result_file(self.folder, settings.model), generator, used, facts)
        write_file(self.folder / f"{prefix(settings.model)}card.json", (json.dumps(facts["card"], indent=2) + "\n").encode())
        return replace(generator, facts=facts)

    # -- files ---------------------------------------------------------------------------
    def _network(
        self,
        stage: str,
        made_by: Mapping[str, Any],
        build: Callable[[], Network],
        train: Callable[[Callable[[int, float], None]], Network],
        steps: int,
    ) -> Network:
        """A stage that is one network: from its file, or trained."""
        key = self._key(stage, made_by)
        if known := self._read(stage, key):
            self.progress(stage, 1, 1, "found")
            with torch.random.fork_rng(devices=[]):  # new networks draw weights, which the file's replace
                return loaded(build(), known[0], "", self.device)
        start = time.perf_counter()
        network = train(lambda step, loss: self.progress(stage, step, steps, f"loss {loss:.4f}"))
        _check_finite(stage, arrays_of(network), RATES[stage])
        self._write(stage, arrays_of(network), key, start)
        return network

    def _key(self, stage: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """What a stage's file must agree on to be this stage."""
        return json.loads(json.dumps({"stage": stage, "made_by": dict(settings), "seed": self.settings.seed, **self.tokens.signature}))

    def _read(self, stage: str, key: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
        path = self.folder / f"{stage}.safetensors"
        if not path.exists():
            return None
        arrays, facts = self._read_file(path)
        if any(facts.get(name) != value for name, value in key.items()):
            differs = [name for name, value in key.items() if name != "made_by" and facts.get(name) != value]
            differs += [name for name, value in key["made_by"].items() if facts.get("made_by", {}).get(name) != value]
            what = f" ({', '.join(differs[:3])} differ)" if differs else ""
            raise UnusableFolder(f"{path} was made with other settings{what}. Choose another folder, or remove the file to make it again")
        self.seconds[stage] = float(facts.get("seconds", 0.0))
        return arrays, facts

    def _read_file(self, path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        try:
            return read_arrays(path)
        except DamagedRun as error:
            raise UnusableFolder(f"{path} is damaged. Remove it: the same command makes it again, and only it") from error

    def _write(self, stage: str, arrays: Mapping[str, np.ndarray], key: Mapping[str, Any], start: float) -> None:
        self.seconds[stage] = time.perf_counter() - start
        write_arrays(self.folder / f"{stage}.safetensors", arrays, {**key, "seconds": self.seconds[stage]})


def _check_finite(stage: str, arrays: Mapping[str, np.ndarray], rate: str) -> None:
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise InvalidConfig(f"The training of the stage {stage} diverged: its weights are no longer numbers. Lower {rate}", key=rate)


def _blocks(count: int, size: int) -> np.ndarray:
    """(count,) which block each of ``count`` architectures is in: blocks of ``size``, the last one longer, never shorter."""
    return np.minimum(np.arange(count) // size, max(1, count // size) - 1)


def prefix(model: str) -> str:
    """Of the files that only this model has, so that both fit into one folder and share the others."""
    return "" if model == Generator.model else f"{model}_"


def result_file(folder: Path, model: str) -> Path:
    return folder / f"{prefix(model)}generator.safetensors"


def predictor_card(generator: AnyGenerator, labels: Labels, proxy: Proxy) -> dict[str, Any]:
    """What the predictor is worth on architectures and tasks it has not learned from."""
    assert generator.extractor is not None
    show = task_images(proxy, generator.extractor, labels.tasks)
    return predictor_quality(generator, *labels.tested, show, labels.shown) | {
        "architectures": len(labels.choices),
        "tasks": labels.shown,
        "held_out_tasks": len(labels.tasks) - labels.shown,
        "held_out_classes": len(proxy.held_out),
    }


def _without(settings: PaperSettings, names: Sequence[str]) -> dict[str, Any]:
    """Those that a stage depends on."""
    return {name: value for name, value in asdict(settings).items() if name not in (*names, *SAMPLING_ONLY)}


def _learned_from(labels: Labels, extractor: FeatureExtractor) -> dict[str, str]:
    return {"labels": labels.digest, "features": digest_of(extractor.network)}


def _padded(tasks: Sequence[Task]) -> np.ndarray:
    """(tasks, most classes) class numbers, -1 where a task has fewer."""
    return padded([task.classes for task in tasks], max(len(task.classes) for task in tasks)).astype(np.int16)


def _kept_tasks(arrays: Mapping[str, np.ndarray], wanted: ProxySettings) -> list[Task]:
    rows = zip(arrays["tasks"], arrays["conditions"], strict=True)
    return [Task(classes[classes >= 0].astype(np.int64), wanted.conditions[number]) for classes, number in rows]
