"""Public images that the predictor learns from, and tasks made of their classes.

A task is a subset of classes, and how its images were taken. Some classes are held out: no task of the predictor has one, so what it
says about tasks of theirs is a test of it. Some images of every class are kept from all training: they score.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.client_site import Examples
from fedloom.core.errors import InvalidConfig, InvalidData
from fedloom.core.seeds import rng
from fedloom.core.settings import setting
from fedloom.data.readers import Dataset, Pool
from fedloom.generator.conditions import CONDITIONS, taken
from fedloom.generator.features import FeatureExtractor
from fedloom.generator.task_encoder import PER_CLASS, Grouped
from fedloom.spaces.base import ImageShape
from fedloom.training.pixels import Pixels

Subset = npt.NDArray[np.int64]  # class numbers


@dataclass(frozen=True)
class ProxySettings:
    image_size: int = setting(32, "larger images are averaged down to this side in pixels", low=8)
    reserved: int = setting(100, "training images per class kept for scoring, not for training; the test pool is added to them", low=0)
    held_out: float = setting(0.2, "share of the classes that the predictor never sees", low=0.05, high=0.8)
    tasks: int = setting(1200, "class subsets on which architectures are scored", low=3)
    held_out_tasks: int = setting(120, "class subsets of the held-out classes, which test the predictor", low=3)
    task_sizes: tuple[int, ...] = setting((5, 10, 20), "numbers of classes in a task, used in turn; never more than there are", low=2)
    conditions: tuple[str, ...] = setting(
        tuple(CONDITIONS), f"conditions of a task's images, used in turn: {', '.join(CONDITIONS)}", choices=tuple(CONDITIONS)
    )
    alike: float = setting(0.5, "share of tasks whose classes look alike; the others have random classes", low=0, high=1)


@dataclass(frozen=True)
class Task:
    classes: Subset  # sorted
    condition: str = "plain"


@dataclass(frozen=True)
class Proxy:
    """The images of a public data set by their use, on the training device."""

    name: str
    train: Examples  # supernet, features, and what tasks look like
    scoring: Tensor  # (classes, images, channels, side, side) uint8, never trained on
    pixels: Pixels
    shown: Subset  # classes that the predictor may see
    held_out: Subset

    @cached_property
    def digest(self) -> str:
        """What other training images would not have."""
        digest = hashlib.blake2b(self.name.encode(), digest_size=16)
        for tensor in (self.train.images, self.train.labels):
            digest.update(tensor.cpu().contiguous().numpy())
        return digest.hexdigest()

    @property
    def image(self) -> ImageShape:
        return ImageShape(self.scoring.shape[2], self.scoring.shape[-1], len(self.scoring))


def make_proxy(dataset: Dataset, settings: ProxySettings, device: torch.device) -> Proxy:
    if not settings.task_sizes:
        raise InvalidConfig("proxy.task_sizes is empty. Name at least one number of classes, such as [5]", key="proxy.task_sizes")
    if not settings.conditions:
        raise InvalidConfig('proxy.conditions is empty. Name at least one, such as ["plain"]', key="proxy.conditions")
    classes = len(dataset.classes)
    train, test = (_smaller(pool, settings.image_size) for pool in (dataset.train, dataset.test))
    kept, scoring = [], []
    for label in range(classes):
        own = rng("reserved", dataset.name, label).permutation(np.flatnonzero(dataset.train.labels == label))
        if len(own) <= settings.reserved:
            what = f"{dataset.name} has {len(own)} training images of {dataset.classes[label]!r}"
            raise InvalidData(f"{what}: reserve fewer than that, not {settings.reserved} (proxy.reserved)")
        kept.append(own[settings.reserved :])
        scoring.append(torch.cat([train[own[: settings.reserved]], test[np.flatnonzero(dataset.test.labels == label)]]))
    fewest = min(map(len, scoring))
    if fewest < 2:
        raise InvalidData(f"{dataset.name} leaves fewer than two images of a class to score with. Raise proxy.reserved")
    order = rng("held-out classes", dataset.name).permutation(classes)
    held_out = max(2, round(settings.held_out * classes))
    if classes - held_out < 2:
        cure = "Lower proxy.held_out" if classes > 3 else "Use data of at least four"
        raise InvalidData(f"{dataset.name} has {classes} classes, too few to hold {held_out} out and show at least two. {cure}")
    rows = np.concatenate(kept)
    return Proxy(
        name=dataset.name,
        train=Examples(train[rows].to(device), torch.from_numpy(dataset.train.labels[rows]).to(device)),
        scoring=torch.stack([part[:fewest] for part in scoring]).to(device),
        pixels=Pixels(dataset.mean, dataset.std),
        shown=np.sort(order[held_out:]),
        held_out=np.sort(order[:held_out]),
    )


def _smaller(pool: Pool, side: int) -> Tensor:
    """The pool's images, averaged down to this side where they are larger."""
    images = torch.from_numpy(pool.images)
    if images.shape[-1] <= side:
        return images
    parts = [F.interpolate(part.float(), size=(side, side), mode="area").round().byte() for part in images.split(4096)]
    return torch.cat(parts)


# -- tasks ---------------------------------------------------------------------------
def draw_tasks(
    settings: ProxySettings, classes: Subset, count: int, likeness: npt.NDArray[np.float64], draw: np.random.Generator
) -> list[Task]:
    """Subsets of these classes, sizes in turn, then conditions; likeness: (all classes, all classes), larger is more alike."""
    tasks = []
    for number in range(count):
        turn, place = divmod(number, len(settings.task_sizes))
        size = min(settings.task_sizes[place], len(classes))
        if draw.random() < settings.alike:  # a class and those most like it, out of twice as many as needed
            nearest = classes[np.argsort(-likeness[draw.choice(classes), classes], kind="stable")][: 2 * size]
            subset = np.concatenate([nearest[:1], draw.choice(nearest[1:], size - 1, replace=False)])
        else:
            subset = draw.choice(classes, size, replace=False)
        tasks.append(Task(np.sort(subset), settings.conditions[turn % len(settings.conditions)]))
    return tasks


def class_likeness(features: Tensor, labels: Tensor, classes: int) -> npt.NDArray[np.float64]:
    """(classes, classes) cosine between mean features, centred."""
    means = torch.stack([features[labels == label].mean(0) for label in range(classes)])
    unit = F.normalize(means - means.mean(0), dim=1)
    return (unit @ unit.T).cpu().double().numpy()


def subset_accuracies(logits: Tensor, subsets: Tensor) -> Tensor:
    """Accuracy on tasks of one size, told apart among their own classes only.

    logits: (classes, images, classes) of the images of every class; subsets: (tasks, size) class numbers -> (tasks,).
    """
    images, own = torch.arange(logits.shape[1], device=logits.device), torch.arange(subsets.shape[1], device=logits.device)
    part = logits[subsets[:, :, None, None], images[:, None], subsets[:, None, None, :]]  # (tasks, size, images, size)
    return (part.argmax(-1) == own[:, None]).float().mean((1, 2))


def task_images(proxy: Proxy, extractor: FeatureExtractor, tasks: Sequence[Task]) -> Callable[[Sequence[int], torch.Generator], Grouped]:
    """A function that shows tasks: fresh random images of each class, as a client would have them, 1 to 20 per class."""
    labels = proxy.train.labels
    rows = [torch.nonzero(labels == label)[:, 0] for label in range(proxy.image.classes)]
    fewest = min(map(len, rows))
    conditions = sorted({task.condition for task in tasks})

    def of_condition(condition: str) -> Tensor:
        features = extractor(taken(proxy.train.images, condition))
        return torch.stack([features[own[:fewest]] for own in rows])

    table = torch.stack([of_condition(condition) for condition in conditions])  # (conditions, classes, images, F)
    condition_of = [conditions.index(task.condition) for task in tasks]

    def show(numbers: Sequence[int], draw: torch.Generator) -> Grouped:
        device, widest = table.device, max(len(tasks[number].classes) for number in numbers)
        classes = torch.tensor(padded([tasks[number].classes for number in numbers], widest), device=device)
        class_mask = classes >= 0
        chosen = torch.randint(fewest, (*classes.shape, PER_CLASS), generator=draw, device=device)
        condition = torch.tensor([condition_of[number] for number in numbers], device=device)[:, None, None]
        grouped = table[condition, classes.clamp_min(0)[..., None], chosen]  # (tasks, classes, images, F)
        counts = torch.randint(1, PER_CLASS + 1, classes.shape, generator=draw, device=device)
        image_mask = (torch.arange(PER_CLASS, device=device) < counts[..., None]) & class_mask[..., None]
        shares = torch.where(class_mask, -class_mask.sum(1, keepdim=True).float().log(), 0.0)
        return Grouped(grouped * image_mask[..., None], class_mask, image_mask, shares)

    return show


def padded(subsets: Sequence[Subset], widest: int) -> Subset:
    """(subsets, widest) class numbers, -1 where a subset has fewer."""
    return np.stack([np.pad(subset, (0, widest - len(subset)), constant_values=-1) for subset in subsets])
