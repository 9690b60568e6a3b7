"""How the networks of the toy space compute: the first channels of every layer and the middle of every kernel are shared."""

import torch
import torch.nn.functional as F
from toy_space import BLOCKS, DEPTHS, EXPANSIONS, KERNELS, WIDTHS, Toy, ToySettings

from fedloom.supernets.base import SUPERNETS, Supernet
from fedloom.supernets.elastic import below, centre, normed, pick

ALL, LARGEST = slice(None), max(KERNELS)


@SUPERNETS.add("toy", ToySettings, "nested channels, kernels from the middle of the largest")
class ToySupernet(Supernet[Toy]):
    def initial(self, seed):
        draw = torch.Generator().manual_seed(seed)
        width, blocks = self.space.blocks(self.space.named["largest"])
        layers = {"stem": (width, self.space.image.channels, 3)}  # outputs, inputs (per group), kernel
        for name, kernel, middle in blocks:
            layers |= {f"{name}.expand": (middle, width, 1), f"{name}.depth": (middle, 1, kernel), f"{name}.project": (width, middle, 1)}
        weights = {}
        for name, (outputs, inputs, kernel) in layers.items():
            deviation = (2 / (inputs * kernel**2)) ** 0.5
            weights[f"{name}.conv.weight"] = torch.randn(outputs, inputs, kernel, kernel, generator=draw) * deviation
            weights |= {f"{name}.norm.weight": torch.ones(outputs), f"{name}.norm.bias": torch.zeros(outputs)}
        classes = self.space.image.classes
        weights["classifier.weight"] = torch.randn(classes, width, generator=draw) * 0.1
        return weights | {"classifier.bias": torch.zeros(classes)}

    def regions(self, architecture):
        """Which part of each parameter an architecture uses; blocks that it lacks are not named."""
        width, blocks = self.space.blocks(architecture)
        outer = slice(0, width)
        parts = {"stem": (outer, (outer, ALL, ALL, ALL))}  # outputs, and the convolution's weight
        for name, kernel, middle in blocks:
            inner, window = slice(0, middle), centre(LARGEST, kernel)
            parts[f"{name}.expand"] = (inner, (inner, outer, ALL, ALL))
            parts[f"{name}.depth"] = (inner, (inner, ALL, window, window))
            parts[f"{name}.project"] = (outer, (outer, inner, ALL, ALL))
        regions = {"classifier.weight": (ALL, outer), "classifier.bias": (ALL,)}
        for name, (outputs, weight) in parts.items():
            regions |= {f"{name}.conv.weight": weight, f"{name}.norm.weight": (outputs,), f"{name}.norm.bias": (outputs,)}
        return regions

    def forward(self, images, weights, architecture, statistics=None):
        x = F.relu(normed(images, weights, "stem", statistics, stride=self.space.settings.stride))
        for name, *_ in self.space.blocks(architecture)[1]:
            y = F.relu(normed(x, weights, f"{name}.expand", statistics))
            y = F.relu(normed(y, weights, f"{name}.depth", statistics))
            x = x + normed(y, weights, f"{name}.project", statistics)
        return F.linear(x.mean((2, 3)), weights["classifier.weight"], weights["classifier.bias"])

    def masked(self, images, weights, genes, statistics=None):
        """For GPUs, and may be left out: the largest network with everything that an architecture lacks at zero."""
        width, depth = pick(WIDTHS, genes[0]), pick(DEPTHS, genes[1])
        outer = below(max(WIDTHS), width)
        distance = (torch.arange(LARGEST, device=genes.device) - LARGEST // 2).abs()
        x = F.relu(normed(images, weights, "stem", statistics, stride=self.space.settings.stride, mask=outer))
        for block, (name, _, middle) in enumerate(self.space.blocks(self.space.named["largest"])[1]):
            kernel_gene, expansion_gene = genes[2 + block], genes[2 + len(BLOCKS) + block]
            inner = below(middle, pick(EXPANSIONS, expansion_gene) * width)
            near = torch.maximum(distance[:, None], distance) <= pick(KERNELS, kernel_gene) // 2
            kernel = weights[f"{name}.depth.conv.weight"] * near
            y = F.relu(normed(x, weights, f"{name}.expand", statistics, mask=inner))
            y = F.relu(normed(y, weights, f"{name}.depth", statistics, kernel, mask=inner))
            y = x + normed(y, weights, f"{name}.project", statistics, mask=outer)
            x = torch.where(depth > block, y, x)
        return F.linear(x.mean((2, 3)), weights["classifier.weight"], weights["classifier.bias"])
