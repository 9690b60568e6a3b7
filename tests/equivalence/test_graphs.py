"""A captured training step does what the eager step does. Needs a GPU: `pytest -m gpu`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedloom.core.client_site import Examples
from fedloom.spaces.base import ImageShape
from fedloom.spaces.mobilenetv3 import MobileNetV3, MobileNetV3Settings
from fedloom.supernets.mobilenetv3 import MobileNetV3Supernet
from fedloom.training import local
from fedloom.training.local import Pixels, Trainer
from fedloom.training.recipe import TrainingSettings

pytestmark = pytest.mark.gpu


def test_replayed_steps_equal_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.backends.cudnn.allow_tf32 = False  # rounding of TF32 would hide a wrong step
    device = torch.device("cuda")
    supernet = MobileNetV3Supernet(MobileNetV3(MobileNetV3Settings(width=0.5), ImageShape(3, 32, 10)))
    trainer = Trainer(supernet, TrainingSettings(), Pixels((0.5,) * 3, (0.25,) * 3))
    architecture = supernet.space.named["medium"]
    plain = {name: tensor.to(device) for name, tensor in supernet.plain(supernet.initial(0), architecture).items()}
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (120, 3, 32, 32), generator=generator, dtype=torch.uint8).to(device)
    examples = Examples(images, torch.randint(0, 10, (120,), generator=generator).to(device))

    def trained(worth: int) -> dict[str, torch.Tensor]:
        monkeypatch.setattr(local, "WORTH_A_GRAPH", worth)
        trainer._graph = None
        return trainer.train_network(plain, architecture, examples, [0.02, 0.01], np.random.default_rng(0)).weights

    eager, replayed = trained(10**9), trained(1)
    again = trainer.train_network(plain, architecture, examples, [0.02, 0.01], np.random.default_rng(0)).weights  # the same graph
    for name, tensor in eager.items():
        scale = max(float((tensor - plain[name]).abs().max()), 1e-6)
        assert float((replayed[name] - tensor).abs().max()) < 0.02 * scale, name
        assert float((again[name] - replayed[name]).abs().max()) < 0.02 * scale, name
