"""The stand-alone network of a supernet that brings none of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fedloom.core.architecture import Architecture
from fedloom.supernets.normalisation import Statistics


class StandAlone(nn.Module):
    """An architecture's own weights and statistics under their names, and the supernet's function that computes with them."""

    def __init__(
        self, compute: Callable[..., Tensor], architecture: Architecture, weights: Mapping[str, Tensor], statistics: Statistics
    ) -> None:
        super().__init__()
        self._compute, self._architecture, self._norms = compute, architecture, tuple(statistics)
        self._asked = ""
        for name, tensor in weights.items():
            module, _, leaf = name.rpartition(".")
            self._module(module).register_parameter(leaf, nn.Parameter(tensor))
        for name, moments in statistics.items():
            for moment, tensor in zip(("running_mean", "running_var"), moments, strict=True):
                self._module(name).register_buffer(moment, tensor)

    def _module(self, path: str) -> nn.Module:
        """The module at a path such as block1.conv, made where it is missing."""
        module: nn.Module = self
        for part in filter(None, path.split(".")):
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        return module

    def asks(self, place: str) -> None:
        """From now on the module at this path, not ``compute``, makes logits of what the classifier sees."""
        self._asked = place

    def forward(self, images: Tensor) -> Tensor:
        held = self.state_dict(keep_vars=True)
        known = Statistics({name: (held[f"{name}.running_mean"], held[f"{name}.running_var"]) for name in self._norms})
        if not self._asked:
            return self._compute(images, held, self._architecture, None if self.training else known)
        same = torch.eye(held[f"{self._asked}.weight"].shape[1], device=images.device)  # a classifier that hands on what it gets
        held |= {f"{self._asked}.weight": same, f"{self._asked}.bias": torch.zeros_like(same[0])}
        features = self._compute(images, held, self._architecture, None if self.training else known)
        logits: Tensor = self.get_submodule(self._asked)(features)
        return logits
