"""How a generator makes architectures, as pictures: what it believes of every gene from step to step, and what it draws how often.

Both are tables with a row per gene. A cell is a stacked bar: how much of the belief, or of the draws, each choice has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedloom.generator.generator import Gain, Generator
from fedloom.generator.tokens import Tokens
from fedloom.maths.samplers import Denoise
from fedloom.report.drawing import GAP, MARGIN, Sheet, kind_of, width_of
from fedloom.spaces.base import Gene

Shares = npt.NDArray[np.floating]  # (rows, symbols), each row adds up to 1

SCALE = "#f0b942", "#2f9c95", "#31559c"  # smallest, middle and largest choice: ordered by lightness too
ABSENT = "#d0d0d0"
TALL, WIDE = 640, 600  # about how high all rows are together, and how wide all steps or bars
LEAVING_OUT = 0.004  # shares below this are not drawn: less than a tenth of a pixel
TIES = ("of", "in", "the")  # words between what a gene decides and where


# -- what is drawn -----------------------------------------------------------------
@dataclass(frozen=True)
class Course:
    """One architecture on its way from noise."""

    levels: tuple[float, ...]  # of noise, one per step
    beliefs: npt.NDArray[np.floating]  # (steps, rows, symbols) the share of each symbol in what the denoiser believes at that step
    symbols: npt.NDArray[np.int64]  # (rows,) what came out

    @property
    def decided(self) -> list[float]:
        """For each step how much of the belief has what came out, in the mean over genes."""
        return [float(beliefs[np.arange(len(self.symbols)), self.symbols].mean()) for beliefs in self.beliefs]


@dataclass(frozen=True)
class _Watched(Generator):
    """The same generator, and what it predicted last at every level."""

    seen: dict[float, Tensor] = field(default_factory=dict)

    def denoise(self, gain: Gain | None, strength: float) -> Denoise:
        inner = super().denoise(gain, strength)

        def watched(x: Tensor, level: float) -> Tensor:
            self.seen[level] = prediction = inner(x, level)
            return prediction

        return watched


def denoising(generator: Generator, rng: np.random.Generator, task: Tensor | None = None, strength: float | None = None) -> Course:
    """How ``generator.draw(1, rng, task, strength)`` comes to its architecture."""
    watched = _Watched(**{item.name: getattr(generator, item.name) for item in fields(generator)})
    strength = generator.strength if strength is None else strength
    choices = watched.draw_choices(1, rng, generator.guide(task) if strength else None, strength)
    levels = tuple(level for level in generator.levels() if level in watched.seen)  # all but the last, which is the result's
    mask = generator.denoiser.mask
    beliefs = torch.stack([torch.where(mask, (watched.seen[level][0] + 1) / 2, 0.0) for level in levels])  # -1..1 to shares
    return Course(levels, beliefs.cpu().numpy(), generator.tokens.encode(choices)[0].numpy())


def marginals(tokens: Tokens, choices: npt.NDArray[np.int64]) -> Shares:
    """(rows, symbols) how often each symbol comes in these architectures (n, genes)."""
    found: Shares = tokens.shares(tokens.encode(choices)).mean(0).numpy()
    return found


# -- pictures ----------------------------------------------------------------------
def draw_denoising(tokens: Tokens, courses: Mapping[str, Course], title: str, subtitle: str, description: str) -> str:
    """Courses of one sampler side by side, by name: a column per step, then what came out, bold where it is not as in the first."""
    table, first = _Table(tokens, title, subtitle), next(iter(courses.values()))
    words = [[*map(str, gene.shown)] for gene in table.genes]
    result = 24 + max(width_of(word, 11, bold=True) for row in words for word in row)
    left, head, wide = table.left, table.top, WIDE / len(courses) / len(first.levels)
    table.sheet.text(left - 8, head + 24, "step", 11, "end", ink=True)
    table.sheet.text(left - 8, head + 40, "noise level σ", 11, "end", ink=True)
    table.lay_rows(head + 54)
    for name, course in courses.items():
        table.sheet.text(left, head + 4, name, 13, bold=True, ink=True)
        for step, (level, beliefs) in enumerate(zip(course.levels, course.beliefs, strict=True)):
            x = left + step * wide
            table.sheet.text(x + (wide - 1) / 2, head + 24, str(step + 1), 11, "middle", ink=True)
            table.sheet.text(x + (wide - 1) / 2, head + 40, f"{level:.1f}" if level >= 1 else f"{level:.2f}", 9, "middle", ink=True)
            for row, y in enumerate(table.tops):
                table.upright(row, beliefs[row], x, y, wide - 1)
        x = left + len(course.levels) * wide + 8
        table.sheet.text(x, head + 24, "result", 11, ink=True)
        for row, (symbol, y) in enumerate(zip(course.symbols, table.tops, strict=True)):
            table.bars[table.colours[row][symbol]].append(_rectangle(x, y, 14, table.height))
            absent = symbol >= len(words[row])
            word, changed = "–" if absent else words[row][symbol], symbol != first.symbols[row]
            table.sheet.text(x + 19, y + table.height / 2, word, 11, bold=bool(changed), ink=True)
        left = x + result + GAP
    return table.finish(description)


def draw_marginals(tokens: Tokens, sources: Mapping[str, Shares], title: str, subtitle: str, description: str) -> str:
    """Shares of choices by source, side by side. Lines through the later ones are where the bars of the first end."""
    table, reference = _Table(tokens, title, subtitle), next(iter(sources.values()))
    left, head, wide = table.left, table.top, max(190.0, WIDE / len(sources))
    table.lay_rows(head + 42)
    for name, shares in sources.items():
        table.sheet.text(left, head + 4, name, 13, bold=True, ink=True)
        distance = 0.5 * np.abs(shares - reference).sum(1)
        if shares is not reference:
            table.sheet.text(left, head + 22, f"distance {distance.mean():.3f}, at most {distance.max():.3f}", 11, ink=True)
        for row, y in enumerate(table.tops):
            table.lying(row, shares[row], left, y, wide)
            if shares is not reference:
                ends = left + wide * reference[row].cumsum()[table.order[row]]
                table.marks += [f"M{end:.1f} {y:.1f}v{table.height:.1f}" for end in ends if end < left + wide - 0.1]
        for percent in (0, 50, 100):
            x = left + wide * percent / 100
            table.sheet.add("path", d=f"M{x:.1f} {table.bottom + 2:.1f}v4", stroke="#757575", class_="fl-line")
            table.sheet.text(x, table.bottom + 14, str(percent), 10, "middle", ink=True)
        table.sheet.text(left + wide / 2, table.bottom + 28, "share of architectures, %", 11, "middle", ink=True)
        left += wide + 2 * GAP
    table.bottom += 36
    return table.finish(description)


class _Table:
    """Rows of genes, in groups by stage and a little apart by place, with their names on the left; bars by colour."""

    def __init__(self, tokens: Tokens, title: str, subtitle: str) -> None:
        self.sheet, self.title = Sheet(), title
        self.sheet.text(MARGIN, MARGIN + 8, title, 17, bold=True, ink=True)
        self.sheet.text(MARGIN, MARGIN + 32, subtitle, 12, ink=True)
        self.top = MARGIN + 64.0
        self.genes = [tokens.space.genes[gene] for gene in tokens.genes]
        self.colours = [[*colours_of(gene), *[ABSENT] * (tokens.symbols - len(gene.values))] for gene in self.genes]
        self.absent = bool(tokens.may_be_absent.any())
        # rows are drawn by stage and place, whatever the order of genes
        stages = groupby(sorted(range(len(self.genes)), key=lambda row: tokens.places[row]), lambda row: tokens.places[row][0])
        self.groups = [(rows, *shortened([self.genes[row].name for row in rows])) for rows in (list(found) for _, found in stages)]
        self.places = tokens.places
        self.order = [np.flatnonzero(mask) for mask in tokens.mask.numpy()]  # the symbols each row has
        self.height = float(np.clip(TALL // len(self.genes), 12, 18))
        self.left = MARGIN + 8 + max(width_of(name, 11) for _, title, names in self.groups for name in (title, *names))
        self.tops = [0.0] * len(self.genes)
        self.bars: dict[str, list[str]] = defaultdict(list)  # paths by colour: one element each keeps the file small
        self.marks: list[str] = []
        self.bottom = self.top

    def lay_rows(self, y: float) -> None:
        for rows, title, names in self.groups:
            if title:
                self.sheet.text(MARGIN, y + 7, title, 11, bold=True, ink=True)
                y += 16
            before = self.places[rows[0]]
            for row, name in zip(rows, names, strict=True):
                y += 3 if self.places[row] != before and len(self.places) > len(set(self.places)) else 0
                before, self.tops[row] = self.places[row], y
                self.sheet.text(self.left - 8, y + self.height / 2, name, 11, "end", ink=True)
                y += self.height + 1
            y += 9
        self.bottom = y - 9

    def upright(self, row: int, shares: Shares, x: float, y: float, wide: float) -> None:
        """The first choice at the bottom."""
        ends = self.height * (1 - np.concatenate([[0], shares[self.order[row]].cumsum()]))
        for symbol, low, high in zip(self.order[row], ends, ends[1:], strict=False):
            if shares[symbol] > LEAVING_OUT:
                self.bars[self.colours[row][symbol]].append(_rectangle(x, y + high, wide, low - high))

    def lying(self, row: int, shares: Shares, x: float, y: float, wide: float) -> None:
        """The first choice on the left."""
        ends = wide * np.concatenate([[0], shares[self.order[row]].cumsum()])
        for symbol, low, high in zip(self.order[row], ends, ends[1:], strict=False):
            if shares[symbol] > LEAVING_OUT:
                self.bars[self.colours[row][symbol]].append(_rectangle(x + low, y, high - low, self.height))

    def finish(self, description: str) -> str:
        for colour, paths in self.bars.items():
            self.sheet.add("path", d="".join(paths), fill=colour)
        self.sheet.add("path", d="".join(self.marks), stroke="#000000", stroke_width=1, stroke_opacity="0.7", fill="none")
        x, y = float(MARGIN), self.bottom + GAP
        for name, colour in self.legend():
            self.sheet.add("rect", x=x, y=y + 4, width=14, height=12, fill=colour)
            self.sheet.text(x + 20, y + 10, name, 11, ink=True)
            x += 20 + width_of(name, 11) + GAP
            if x > self.sheet.width - 100:
                x, y = float(MARGIN), y + 22
        return self.sheet.finish(self.title, description)

    def legend(self) -> list[tuple[str, str]]:
        """(name, colour) of choices."""
        named = {label: colour for gene in self.genes for label, colour in zip(gene.labels, colours_of(gene), strict=False)}
        rows = list(named.items())
        if any(not gene.labels for gene in self.genes):
            rows += zip(("smallest choice of a gene", "middle", "largest"), SCALE, strict=True)
        return [*rows, ("absent: other genes leave it without effect", ABSENT)] if self.absent else rows


# -- names and colours -------------------------------------------------------------
def shortened(names: Sequence[str]) -> tuple[str, list[str]]:
    """What all these names end with, as a title, and the names without it and without what all begin with.

    >>> shortened(["depth of stage 1", "kernel of block 1 of stage 1"])
    ('stage 1', ['depth', 'kernel of block 1'])
    """
    words = [name.split() for name in names]
    if len(words) < 2:
        return "", list(names)
    shortest = min(map(len, words))

    def shared(side: int, most: int) -> int:
        """How many words all have on one side (0 left, 1 right), up to so many."""
        turned = [row[::-1] if side else row for row in words]
        return next((count for count in range(most) if len({row[count] for row in turned}) > 1), most)

    end = shared(1, shortest - 1)
    while end and words[0][-end] not in TIES:  # "… of stage 1", not "1"
        end -= 1
    begin = shared(0, shortest - end - 1)
    title = words[0][len(words[0]) - end :]
    while title and title[0] in TIES:
        title = title[1:]
    return " ".join(title), [" ".join(row[begin : len(row) - end]) for row in words]


def colours_of(gene: Gene) -> list[str]:
    """Of its choices: named operations as in pictures of architectures, lighter ones first within a kind; numbers along a scale."""
    if not gene.labels:
        places = np.linspace(0, len(SCALE) - 1, len(gene.values))
        return [_mixed(SCALE[int(place)], SCALE[min(int(place) + 1, len(SCALE) - 1)], place % 1) for place in places]
    kinds = [kind_of(label) for label in gene.labels]
    colours = []
    for index, kind in enumerate(kinds):
        alike = kinds.count(kind)
        light = 0.5 * (1 - kinds[:index].count(kind) / (alike - 1)) if alike > 1 else 0.0
        colours.append(_mixed(kind.colour, "#ffffff", light))
    return colours


def _mixed(first: str, second: str, share: float) -> str:
    """So much of the second in the first."""
    parts = [[int(colour[place : place + 2], 16) for place in (1, 3, 5)] for colour in (first, second)]
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in zip(*parts, strict=True))


def _rectangle(x: float, y: float, wide: float, tall: float) -> str:
    return "M{} {}h{}v{}h-{}z".format(*(f"{number:.1f}".removesuffix(".0") for number in (x, y, wide, tall, wide)))
