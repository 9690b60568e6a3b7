"""The denoising network: which architecture is behind this noise?

Data prediction with a categorical head. If genes were independent, Bayes' rule would give the answer in closed form: under noise of
level sigma symbol k has log-probability ``log prior_k + 2 x_k / sigma^2`` (symbols are +-1, so |x - e_k|^2 differs by -4 x_k). The
network adds what that misses, the dependence between genes, so it starts exact for independent ones and trains in minutes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.errors import InvalidConfig
from fedloom.core.settings import setting
from fedloom.generator.tokens import Tokens

SIGMA_MIN, SIGMA_MAX = 0.2, 6.0  # noise levels: below the first nothing is left to decide, above the second nothing is known
SHARPEST = 60.0  # bound of the closed-form logits: float32 has nothing beyond


@dataclass(frozen=True)
class DenoiserSettings:
    architectures: int = setting(500_000, "architectures sampled for training", low=100)
    steps: int = setting(6_000, "training steps", low=1)
    batch: int = setting(512, "architectures per step", low=1)
    rate: float = setting(2e-3, "learning rate of AdamW at its peak", low=0)
    width: int = setting(64, "numbers per token", low=8)
    layers: int = setting(3, "attention layers", low=1)
    heads: int = setting(4, "attention heads", low=1)
    average: float = setting(0.999, "decay of the moving average of weights, which is what is kept", low=0, high=1)


def sinusoid(values: Tensor, width: int) -> Tensor:
    """(n,) numbers -> (n, width) sines and cosines of them at geometric frequencies."""
    frequencies = torch.exp(torch.arange(width // 2, device=values.device) * (-math.log(1000.0) / (width // 2)))
    angles = values[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], -1)


class Layer(nn.Module):
    """Pre-norm attention over all tokens, then a feed-forward network on each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        n, count, width = tokens.shape
        parts = self.queries_keys_values(self.before_attention(tokens)).view(n, count, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)  # each (n, heads, count, width / heads)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, count, width)
        tokens = tokens + self.mix(seen)
        return tokens + self.feed(self.before_feed(tokens))


class Denoiser(nn.Module):
    mask: Tensor  # (rows, symbols) which symbols a row has
    prior: Tensor  # (rows, symbols) log-shares of symbols in the training architectures; 0 where a row has no such symbol
    slots: Tensor  # (blocks, slots) rows of each token
    back: Tensor  # (rows,) place of each row among blocks * slots
    position: Tensor  # (blocks, width) code of the place within its stage

    def __init__(self, tokens: Tokens, settings: DenoiserSettings) -> None:
        super().__init__()
        self.symbols, width = tokens.symbols, settings.width
        if width % 2 or width % settings.heads:
            raise InvalidConfig(f"denoiser.width must be even and a multiple of denoiser.heads; got {width} and {settings.heads}")
        blocks, slots = tokens.slots.shape
        rows = tokens.slots.flatten()
        places = torch.tensor([place for _, place in tokens.blocks], dtype=torch.float32)
        self.register_buffer("slots", tokens.slots, persistent=False)
        self.register_buffer("back", torch.tensor([int((rows == row).nonzero()) for row in range(len(tokens))]), persistent=False)
        self.register_buffer("position", sinusoid(places, width), persistent=False)
        self.register_buffer("mask", tokens.mask, persistent=False)
        self.register_buffer("prior", torch.zeros(tokens.mask.shape))
        self.read = nn.Linear(slots * self.symbols, width)
        self.token = nn.Parameter(0.5 * torch.randn(blocks, width))  # as large as the rest: tokens must tell each other apart
        self.level = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        self.layers = nn.ModuleList(Layer(width, settings.heads) for _ in range(settings.layers))
        self.norm, self.write = nn.LayerNorm(width), nn.Linear(width, slots * self.symbols)
        nn.init.zeros_(self.write.weight)
        nn.init.zeros_(self.write.bias)

    def logits(self, x: Tensor, sigma: Tensor) -> Tensor:
        """x: (n, rows, symbols) noisy tables; sigma: (n,) or () their levels -> (n, rows, symbols) log-probabilities, unnormalised."""
        sigma = sigma.expand(len(x))
        noise = sigma[:, None, None]
        scaled = x / (noise**2 + 1).sqrt()  # unit variance at every level
        padded = torch.cat([scaled, scaled.new_zeros(len(x), 1, self.symbols)], 1)
        tokens = self.read(padded[:, self.slots].flatten(2)) + self.token + self.position
        tokens = tokens + self.level(sinusoid(10 * sigma.log(), self.position.shape[1]))[:, None]
        for layer in self.layers:
            tokens = layer(tokens)
        learned = self.write(self.norm(tokens)).view(len(x), -1, self.symbols)[:, self.back]
        independent = (2 * x / noise**2).clamp(-SHARPEST, SHARPEST)
        return (learned + independent + self.prior).masked_fill(~self.mask, -torch.inf)


def expectation(logits: Tensor, mask: Tensor) -> Tensor:
    """The data prediction E[x0 | x] of these log-probabilities: +-1 tables averaged, 0 where a row has no such symbol."""
    return (2 * logits.softmax(-1) - 1) * mask


def train_denoiser(
    tokens: Tokens, choices: np.ndarray, settings: DenoiserSettings, seed: int, device: torch.device, progress: Callable[[int, float], None]
) -> Denoiser:
    """Unsupervised: cross-entropy of the architecture behind the noise, noise levels drawn log-uniformly."""
    symbols = tokens.encode(choices).to(device)
    with torch.random.fork_rng(devices=[]):  # initial weights from the seed, whatever the device
        torch.manual_seed(seed)
        denoiser = Denoiser(tokens, settings)
    counts = tokens.one_hot(symbols).gt(0).float().mean(0).cpu()
    denoiser.prior.copy_(counts.clamp_min(1e-6).log().masked_fill(~tokens.mask, 0.0))
    denoiser = denoiser.to(device)
    kept = {name: tensor.detach().clone() for name, tensor in denoiser.state_dict().items()}
    draw = torch.Generator(device).manual_seed(seed)
    optimiser = torch.optim.AdamW(denoiser.parameters(), settings.rate, betas=(0.9, 0.98), weight_decay=0.01, fused=device.type == "cuda")
    warm = min(300, settings.steps // 10 + 1)
    for step in range(settings.steps):
        rate = settings.rate * min(1, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / settings.steps))
        for group in optimiser.param_groups:
            group["lr"] = rate
        rows = symbols[torch.randint(len(symbols), (settings.batch,), generator=draw, device=device)]
        level = torch.rand(settings.batch, generator=draw, device=device)
        sigma = SIGMA_MIN * (SIGMA_MAX / SIGMA_MIN) ** level
        clean = tokens.one_hot(rows)
        noisy = clean + sigma[:, None, None] * torch.randn(clean.shape, generator=draw, device=device) * denoiser.mask
        loss = F.cross_entropy(denoiser.logits(noisy, sigma).flatten(0, 1), rows.flatten())
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(denoiser.parameters(), 1.0)
        optimiser.step()
        decay = min(settings.average, (step + 1) / (step + 10))
        with torch.no_grad():
            torch._foreach_lerp_([kept[name] for name, _ in denoiser.named_parameters()], list(denoiser.parameters()), 1 - decay)
        if step % 100 == 99 or step + 1 == settings.steps:
            progress(step + 1, float(loss.detach()))
    denoiser.load_state_dict(kept)
    return denoiser.eval().requires_grad_(False)
