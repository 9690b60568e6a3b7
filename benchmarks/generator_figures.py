"""Figures of docs/explain/generator*.md: how the shipped generators denoise an architecture, what they draw, what guidance is worth.

    python benchmarks/generator_figures.py [spaces…] [--out docs/explain/figures] [--results benchmarks/results] [--seed 0]

Per space `denoising-SPACE.svg` and `marginals-SPACE.svg`, guided too where the generator has a predictor (by the first data set that is
there, and by all of them), and `guidance-SPACE.svg` where `benchmarks/guidance.py` left its record. Prints the markdown that shows them.
The same seed, generators and data give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from generation_pictures import Course, denoising, draw_denoising, draw_marginals, marginals
from torch import Tensor

from fedloom.config import space_settings
from fedloom.core.errors import FedloomError
from fedloom.core.seeds import rng
from fedloom.data.readers import DataSettings, read
from fedloom.generator.files import load_generator
from fedloom.generator.generator import Generator
from fedloom.report.drawing import GAP, MARGIN, Sheet, width_of
from fedloom.spaces.base import SPACES, ImageShape
from fedloom.supernets.base import make_supernet

RESULTS = Path(__file__).parent / "results"
GUIDES = {"cifar10": "CIFAR-10", "digits": "digits"}
DRAWN = 4_000  # architectures behind marginals, of each source
EXACT, REPEATS = 200_000, 20  # architectures that show the space's own shares; repeats of what chance does to DRAWN of them
GAINED, LOST, OPEN = "#0072b2", "#c95500", "#757575"  # intervals above zero, below it, and across
PLOT, ROW = 380, 24  # width of the axis of differences, height of a row


@dataclass(frozen=True)
class FigureFile:
    name: str
    picture: str
    title: str
    caption: str

    def markdown(self, folder: str) -> str:
        return f"![{self.title}]({folder}/{self.name})\n\n*{self.caption}*\n"


# -- the shipped generators ------------------------------------------------------------
def shipped_generator(name: str) -> Generator:
    space = make_supernet(name, space_settings(name, []), ImageShape(3, 32, 10)).space
    generator = load_generator(space, "", "", torch.device("cpu"))
    assert isinstance(generator, Generator)
    return generator


def tasks_of(generator: Generator) -> dict[str, Tensor]:
    """Conditions by the title of their data set, of those that are there; none without a predictor."""
    found = {}
    for name, title in GUIDES.items() if generator.guided else ():
        try:
            pool = read(DataSettings(name=name)).train
        except FedloomError as error:
            print(f"<!-- not guided by {title}: {error} -->")
            continue
        task = generator.task(torch.from_numpy(pool.images), torch.from_numpy(pool.labels))
        assert task is not None
        found[title] = task
    return found


def title_of(generator: Generator) -> str:
    return type(generator.tokens.space).__name__  # as papers write it


def denoising_figure(generator: Generator, tasks: Mapping[str, Tensor], seed: int) -> FigureFile:
    space = title_of(generator)
    title = f"{space}: one architecture on its way from noise"
    courses = {"unguided": denoising(generator, rng(seed, "denoising"))}
    for name, task in list(tasks.items())[:1]:
        courses[f"guided by {name}, strength {generator.strength:g}"] = denoising(generator, rng(seed, "denoising"), task)
    subtitle = "A cell: how much of the denoiser's belief each choice of a gene has at that step."
    subtitle += " Bold: guidance decided differently." if tasks else ""
    caption = denoising_caption(space, generator.sampler, list(courses.values()))
    picture = draw_denoising(generator.tokens, courses, title, subtitle, caption)
    return FigureFile(f"denoising-{generator.tokens.space.name}.svg", picture, title, caption)


def denoising_caption(space: str, sampler: str, courses: Sequence[Course]) -> str:
    first, *others = courses
    steps, genes, share = len(first.levels), len(first.symbols), [100 * part for part in first.decided]
    text = (
        f"{space}, one architecture from noise to result in {steps} steps of `{sampler}`: the choice that comes out has {share[0]:.0f} % "
        f"of the belief at step 1, {share[steps // 2 - 1]:.0f} % at step {steps // 2} and {share[-1]:.0f} % at the end (mean over genes)."
    )
    for other in others:
        changed, sure = int((other.symbols != first.symbols).sum()), 100 * other.decided[0]
        text += (
            f" Guided, the same noise ends with {changed} of {genes} genes decided differently (bold); "
            f"its result has {sure:.0f} % of the belief at step 1."
        )
    return text


def farness(shares: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """(rows,) total variation between shares of choices."""
    return 0.5 * np.abs(shares - reference).sum(1)


def marginals_figure(generator: Generator, tasks: Mapping[str, Tensor], seed: int, drawn: int) -> FigureFile:
    tokens, space = generator.tokens, title_of(generator)
    title = f"{space}: how often each choice is drawn"

    def exact(count: int, *name: str | int) -> np.ndarray:
        return marginals(tokens, tokens.space.sample_many(rng(seed, *name), count))

    sources = {
        "the space itself": exact(EXACT, "space"),
        "drawn, unguided": marginals(tokens, generator.draw_choices(drawn, rng(seed, "unguided"))),
    }
    for name, task in tasks.items():
        choices = generator.draw_choices(drawn, rng(seed, "guided", name), generator.guide(task), generator.strength)
        sources[f"guided by {name}"] = marginals(tokens, choices)
    strength = f", strength {generator.strength:g}" if tasks else ""
    subtitle = f"{drawn:,} draws each{strength}. Lines: the space's own shares. Distance: total variation, mean and largest over genes."
    reference, unguided, *guided = sources.values()
    chance = np.mean([farness(exact(drawn, "chance", repeat), reference).max() for repeat in range(REPEATS)])
    caption = (
        f"{space}, shares of choices. Without guidance the generator should draw as the space does: its farthest gene is "
        f"{farness(unguided, reference).max():.3f} away in total variation, the farthest gene of {drawn:,} draws from the space itself "
        f"is {chance:.3f} away (mean of {REPEATS} repeats)."
    )
    for name, shares in zip(tasks, guided, strict=True):
        distance = farness(shares, reference)
        row = int(distance.argmax())
        gene = tokens.space.genes[tokens.genes[row]]
        caption += f" Guided by {name}, genes move by {distance.mean():.2f} on average; the {gene.name} moves most ({distance[row]:.2f})."
    picture = draw_marginals(tokens, sources, title, subtitle, caption)
    return FigureFile(f"marginals-{tokens.space.name}.svg", picture, title, caption)


# -- what guidance is worth ------------------------------------------------------------
@dataclass(frozen=True)
class Difference:
    """Paired, in points; ``theirs``: accuracy of the rival in percent, if known."""

    ours: str
    rival: str
    mean: float
    low: float
    high: float
    theirs: float | None

    @property
    def heading(self) -> str:
        return f"{self.ours}, against"

    @property
    def colour(self) -> str:
        if self.low == self.high:  # no interval
            return OPEN
        return GAINED if self.low > 0 else LOST if self.high < 0 else OPEN

    @property
    def words(self) -> str:
        text = f"{self.mean:+.2f}" + (f" ({self.low:.2f} to {self.high:.2f})" if self.low < self.high else "")
        return text.replace("-", "−")


def differences(record: Mapping[str, Any]) -> list[Difference]:
    """Those of a record of guidance.py, the largest first for each of ours."""
    found = []
    for names, paired in record["differences"].items():
        ours, _, rival = names.partition(" - ")
        mean, low, high = (100 * (paired["mean"] if paired[key] is None else paired[key]) for key in ("mean", "low", "high"))
        theirs = record["arms"].get(rival)
        found.append(Difference(ours, rival.replace("macs", "MACs"), mean, low, high, 100 * theirs["mean"] if theirs else None))
    order = list(dict.fromkeys(one.ours for one in found))
    return sorted(found, key=lambda one: (order.index(one.ours), -one.mean))


def ticks(low: float, high: float) -> list[float]:
    """Round numbers, about five, from below ``low`` to above ``high``."""
    rough = (high - low) / 5 or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(times * power for times in (1, 2, 5, 10) if times * power >= rough * 0.999)
    return [number * step for number in range(math.floor(low / step), math.ceil(high / step) + 1)]


def draw_guidance(rows: Sequence[Difference], title: str, subtitle: str, description: str) -> str:
    """A row per rival: the mean difference and its interval, zero marked, the same in numbers on the right."""
    sheet = Sheet()
    sheet.text(MARGIN, MARGIN + 8, title, 17, bold=True, ink=True)
    sheet.text(MARGIN, MARGIN + 32, subtitle, 12, ink=True)
    numbers = ticks(min(0.0, *(row.low for row in rows)), max(0.0, *(row.high for row in rows)))
    left = MARGIN + 12 + max(max(width_of(row.rival, 12), width_of(row.heading, 12, bold=True)) for row in rows)
    right, top = left + PLOT + GAP, MARGIN + 64.0

    def across(value: float) -> float:
        return left + PLOT * (value - numbers[0]) / (numbers[-1] - numbers[0])

    wide = max(width_of(row.words, 12) for row in rows)
    sheet.text(right, top, "points (95 % interval)", 11, ink=True)
    theirs = right + max(wide, width_of("points (95 % interval)", 11)) + GAP
    sheet.text(theirs, top, "rival's accuracy, %", 11, ink=True)
    marks, y, before = [], top, ""
    for row in rows:
        if row.ours != before:
            y += 26 if not before else 36
            sheet.text(MARGIN, y, row.heading, 12, bold=True, ink=True)
            before = row.ours
        y += ROW
        marks.append((row, y))
        sheet.text(left - 12, y, row.rival, 12, "end", ink=True)
        sheet.text(right, y, row.words, 12, bold=row.colour != OPEN, ink=True)
        if row.theirs is not None:
            sheet.text(theirs, y, f"{row.theirs:.1f}", 12, ink=True)
    bottom = y + ROW
    for number in numbers:  # lines first, so that intervals lie on them
        zero = abs(number) < 1e-9
        sheet.add(
            "path",
            d=f"M{across(number):.1f} {top + 8:.1f}V{bottom:.1f}",
            stroke="#757575",
            class_="fl-line",
            stroke_width=1.6 if zero else 0.4,
        )
        sheet.text(across(number), bottom + 10, f"{number:+g}".replace("-", "−") if not zero else "0", 11, "middle", ink=True)
    sheet.text(left + PLOT / 2, bottom + 28, "difference in accuracy, percentage points", 12, "middle", ink=True)
    for row, level in marks:
        sheet.add("path", d=f"M{across(row.low):.1f} {level:.1f}H{across(row.high):.1f}", stroke=row.colour, stroke_width=3)
        sheet.add("circle", cx=across(row.mean), cy=level, r=5, fill=row.colour)
    return sheet.finish(title, description)


def guidance_figure(space: str, record: Mapping[str, Any]) -> FigureFile:
    rows = differences(record)
    title = f"{space}: what guidance is worth in true accuracy"
    tasks, each, strength = record["tasks"], record["each"], record["strength"]
    subtitle = (
        f"{tasks} tasks of classes that the predictor never saw, {each} guided architectures per task, strength {strength:g}; "
        "paired over tasks."
    )
    ahead, behind = ([row.rival for row in rows if row.ours == rows[0].ours and row.colour == colour] for colour in (GAINED, LOST))
    asked = sum(row.ours == rows[0].ours for row in rows)
    caption = (
        f"{space}, true accuracy of guided architectures minus each rival's on {tasks} tasks of unseen classes: mean of the paired "
        f"differences and 95 % interval. Guidance is better, with the whole interval right of zero, against {len(ahead)} of {asked} rivals."
    )
    caption += f" It is worse, with the whole interval left of zero, than {', '.join(behind)}." if behind else ""
    return FigureFile(f"guidance-{record['space']}.svg", draw_guidance(rows, title, subtitle, caption), title, caption)


# -- all of them -----------------------------------------------------------------------
def figures(name: str, results: Path, seed: int, drawn: int) -> Iterator[FigureFile]:
    generator = shipped_generator(name)
    tasks = tasks_of(generator)
    yield denoising_figure(generator, tasks, seed)
    yield marginals_figure(generator, tasks, seed, drawn)
    record = results / f"guidance-{name}.json"
    if record.is_file():
        yield guidance_figure(title_of(generator), json.loads(record.read_text()))


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spaces", nargs="*", help="default: all three")
    parser.add_argument("--out", type=Path, default=Path("docs/explain/figures"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--drawn", type=int, default=DRAWN)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(given)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.spaces or ("mobilenetv3", "darts", "nasvit"):
        SPACES[name]  # refuses an unknown name
        for figure in figures(name, arguments.results, arguments.seed, arguments.drawn):
            (arguments.out / figure.name).write_text(figure.picture, encoding="utf-8")
            print(figure.markdown(arguments.out.name), flush=True)


if __name__ == "__main__":
    main()
