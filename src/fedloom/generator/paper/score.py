"""The papers' score network: a transformer along the graph of the architecture (CATE, Yan et al., ICML 2021).

PerFedSDE-NAS, supplement C, which follows DiffusionNAG (An et al., ICLR 2024). What differs is listed in ``generator/paper/training.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.errors import InvalidConfig
from fedloom.core.settings import setting
from fedloom.maths.sde import data_of, prior


@dataclass(frozen=True)
class PaperSettings:
    """Tables A and B of PerFedSDE-NAS; what they leave out is DiffusionNAG's for MobileNetV3."""

    layers: int = setting(12, "attention layers of the score network", low=1)
    width: int = setting(64, "numbers per token", low=2)
    heads: int = setting(8, "attention heads", low=1)
    feed: int = setting(128, "hidden width of the feed-forward networks", low=1)
    dropout: float = setting(0.1, "dropout rate of both networks", low=0, high=1)
    attention: str = setting(
        "direct", "a token sees itself and: the tokens that follow directly, all that follow, or all", choices=("direct", "closure", "full")
    )
    graph_layers: int = setting(4, "directed graph convolutions of the predictor", low=1)
    graph_width: int = setting(144, "width of these convolutions", low=2)
    sigma_min: float = setting(0.1, "smallest noise level", low=0)
    sigma_max: float = setting(5.0, "largest noise level", low=0)
    sampling_steps: int = setting(1000, "steps of the sampler", low=1)
    strength: float = setting(1000.0, "strength of guidance that the generator's file recommends (100,000 divided by 100)", low=0)
    batch: int = setting(256, "architectures per training step", low=1)
    score_steps: int = setting(1_000_000, "training steps of the score network", low=1)
    score_rate: float = setting(2e-5, "learning rate of the score network", low=0)
    predictor_steps: int = setting(20_000, "training steps of the predictor", low=1)
    predictor_rate: float = setting(1e-3, "learning rate of the predictor", low=0)
    warmup: int = setting(1000, "training steps until the full learning rate is reached", low=1)
    clip: float = setting(1.0, "largest norm of a gradient", low=0)
    average: float = setting(0.9999, "decay of the moving average of weights, which is what is kept", low=0, high=1)


SCORE_ONLY = ("layers", "width", "heads", "feed", "attention", "score_steps", "score_rate")  # settings that the predictor does not read
PREDICTOR_ONLY = ("graph_layers", "graph_width", "predictor_steps", "predictor_rate")  # and those that the score network does not
SAMPLING_ONLY = ("sampling_steps", "strength")  # nor training at all


def checked(settings: PaperSettings) -> PaperSettings:
    """Refused where the numbers do not fit together."""
    if settings.width % 2 or settings.width % settings.heads or settings.graph_width % 2:
        got = f"{settings.width}, {settings.heads} and {settings.graph_width}"
        raise InvalidConfig(f"paper.width must be even and a multiple of paper.heads, and paper.graph_width even; got {got}")
    if not 0 < settings.sigma_min < settings.sigma_max:
        raise InvalidConfig(f"paper.sigma_min must be above 0 and below paper.sigma_max; got {settings.sigma_min} and {settings.sigma_max}")
    return settings


def waves(values: Tensor, width: int) -> Tensor:
    """(n,) numbers -> (n, width) their sines and cosines, wave lengths geometric from 2 pi to 20,000 pi (Vaswani et al., 2017)."""
    half = width // 2
    frequencies = torch.exp(torch.arange(half, device=values.device) * (-math.log(10_000) / max(half - 1, 1)))
    angles = values[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], -1)


class LevelCode(nn.Module):
    """(n,) noise levels -> (n, width): waves of sigma through a network of one hidden layer, four times as wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    def forward(self, sigma: Tensor) -> Tensor:
        return self.network(waves(sigma, self.width))


def sees(follows: Tensor, attention: str) -> Tensor:
    """(tokens, tokens) row i sees column j; ``follows[i, j]``: j acts directly on what i made. Each token sees itself."""
    seen = follows | torch.eye(len(follows), dtype=torch.bool, device=follows.device)
    if attention == "full":
        return torch.ones_like(seen)
    if attention == "closure":
        for _ in range(max(len(follows) - 1, 1).bit_length()):  # paths of up to 1, 2, 4, … steps
            seen = seen.float() @ seen.float() > 0
    return seen


class GraphAttention(nn.Module):
    """Pre-norm attention among the tokens each one sees, then a feed-forward network on each."""

    def __init__(self, settings: PaperSettings) -> None:
        super().__init__()
        width = settings.width
        self.heads = settings.heads
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, settings.feed), nn.ReLU(), nn.Dropout(settings.dropout), nn.Linear(settings.feed, width))
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, tokens: Tensor, seen: Tensor) -> Tensor:
        parts = self.queries_keys_values(self.before_attention(tokens)).unflatten(-1, (3, self.heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)  # each (n, heads, tokens, width / heads)
        dropped = self.dropout.p if self.training else 0.0
        heard = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=dropped).transpose(1, 2).flatten(2)
        tokens = tokens + self.dropout(self.mix(heard))
        return tokens + self.dropout(self.feed(self.before_feed(tokens)))


class PaperScoreNetwork(nn.Module):
    """The score of noisy architectures x: (n, tokens, symbols), clean +1 for the symbol of a token, -1 for its others, 0 for none.

    mask: (tokens, symbols) bool, the symbols each token has; follows: (tokens, tokens) bool; places: (stage, place) of each token.
    """

    mask: Tensor
    seen: Tensor  # (tokens, tokens)
    position: Tensor  # (tokens, width)
    data_mean: Tensor  # (tokens, symbols) of the training architectures
    data_deviation: Tensor

    def __init__(self, mask: Tensor, follows: Tensor, places: Sequence[tuple[int, int]], settings: PaperSettings | None = None) -> None:
        super().__init__()
        self.settings = settings = checked(settings or PaperSettings())
        tokens, symbols = mask.shape
        width, joint = settings.width, settings.width * settings.layers
        self.register_buffer("mask", mask, persistent=False)
        self.register_buffer("seen", sees(follows, settings.attention), persistent=False)
        self.register_buffer("position", waves(torch.tensor([float(place) for _, place in places]), width), persistent=False)
        self.register_buffer("data_mean", torch.zeros(tokens, symbols))
        self.register_buffer("data_deviation", torch.zeros(tokens, symbols))
        self.read = nn.Linear(symbols, width)
        self.token = nn.Parameter(torch.zeros(tokens, width))
        self.level = LevelCode(width)
        self.dropout = nn.Dropout(settings.dropout)
        self.layers = nn.ModuleList(GraphAttention(settings) for _ in range(settings.layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(settings.layers))
        self.head = nn.Sequential(
            nn.Linear(joint, 2 * joint), nn.ELU(), nn.Linear(2 * joint, 2 * joint), nn.ELU(), nn.Linear(2 * joint, symbols)
        )

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        """x: (n, tokens, symbols), sigma: (n,) -> the score, shaped like x. Symbols that a token has not are 0 for certain."""
        known = self.dropout(self.read(x * self.mask) * math.sqrt(self.settings.width))
        tokens = known + self.token + self.position + self.level(sigma)[:, None]
        outputs = []
        for layer, norm in zip(self.layers, self.norms, strict=True):
            tokens = layer(tokens, self.seen)
            outputs.append(norm(tokens))
        score = self.head(torch.cat(outputs, -1))
        return torch.where(self.mask, score, -x / sigma[:, None, None] ** 2)

    def denoise(self, x: Tensor, sigma: float) -> Tensor:
        """The data prediction that this score means, as samplers take it."""
        return data_of(self(x, x.new_full((len(x),), sigma)), x, sigma)

    def start(self, noise: Tensor) -> Tensor:
        """Standard normal noise (n, tokens, symbols) as a start at the largest level, around the mean of the training architectures."""
        return prior(noise, self.settings.sigma_max, self.data_mean, self.data_deviation)
