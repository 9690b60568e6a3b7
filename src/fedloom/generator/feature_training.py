"""How the small image network of the generator is trained: as a classifier of public images, once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fedloom.core.seeds import rng
from fedloom.core.settings import setting
from fedloom.data.augment import Augmentation, augment
from fedloom.generator.features import SmallFeatures
from fedloom.generator.proxy import Proxy


@dataclass(frozen=True)
class FeatureSettings:
    file: str = setting("", "weights of ImageNet's ResNet-18 (.pth or .safetensors); empty: train a small network instead", path=True)
    epochs: int = setting(12, "passes over the public images for the small network", low=1)
    batch: int = setting(512, "images per step", low=2)
    rate: float = setting(2e-3, "learning rate of AdamW at its peak", low=0)


def train_features(proxy: Proxy, settings: FeatureSettings, seed: int, progress: Callable[[int, str], None]) -> SmallFeatures:
    """The small feature network as a classifier of the public images; its classifier is then left out."""
    device = proxy.train.labels.device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = SmallFeatures(proxy.image.classes)
    network = network.to(device).train()
    optimiser = torch.optim.AdamW(network.parameters(), settings.rate, weight_decay=0.05)
    examples, batch = proxy.train, min(settings.batch, len(proxy.train))
    steps = len(examples) // batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, settings.rate, total_steps=max(2, settings.epochs * steps))
    augmentation = Augmentation(min(4, proxy.image.size // 8), True, 0)
    for epoch in range(settings.epochs):
        draw, hits = rng(seed, "epoch", epoch), torch.zeros((), device=device)
        order = torch.from_numpy(draw.permutation(len(examples))).to(device)
        for rows in order[: steps * batch].split(batch):
            labels = examples.labels[rows]
            logits = network(augment(examples.images[rows], augmentation, draw, proxy.pixels.mean))
            loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()
            hits += (logits.argmax(1) == labels).sum()
        progress(epoch + 1, f"training accuracy {float(hits) / (steps * batch):.3f}")
    network.classifier = None
    return network.eval().requires_grad_(False)
