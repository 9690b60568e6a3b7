"""Who holds what, and whether clients with similar data got similar networks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from fedloom.core.architecture import Architecture
from fedloom.maths.ranking import above_diagonal, spearman
from fedloom.report.figure import BLUE, FAINT, ORANGE, VERMILION, Axis, Figure, Missing, Numbers, Shown, draw_dots
from fedloom.report.view import Holdings, RunView
from fedloom.report.words import correlation, listed, many, percent, plain

FEW_PAIRS = 15  # six clients: fewer say nothing
MOST_PAIRS = 1500  # that are drawn as points
NAMED = 40  # rows or columns that have room for their names
Matrix = npt.NDArray[np.float64]


# -- the split ---------------------------------------------------------------------------
def split_map(run: RunView) -> Shown:
    title = "Who holds which classes"
    held = run.holdings
    if held is None:
        return Missing(title, run.no_data)
    shares = _shares(held.train)
    rows, columns = np.nonzero(held.unseen)

    def fill(axes: Any) -> None:
        show_shares(axes, shares / max(shares.max(), 1e-9), BLUE)
        small = len(held.clients) > NAMED or len(held.classes) > NAMED
        if len(rows):
            style = {"s": 4 if small else 16, "linewidths": 0.6 if small else 1, "rasterized": len(rows) > 1500}
            axes.scatter(columns, rows, marker="x", color=VERMILION, label="tested on, never trained on", **style)
            axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), borderaxespad=0.2)
        name_ticks(axes.xaxis, held.classes, rotate=max(map(len, held.classes)) > 2)
        name_ticks(axes.yaxis, held.clients)

    tested = held.test.sum(axis=1)
    unseen = np.where(held.unseen, held.test, 0).sum(axis=1)
    return Figure(
        "split",
        title,
        Axis("class", "by name"),
        Axis("client", "by name"),
        _said_of_split(held, unseen, tested),
        fill,
        Numbers(
            ("client", "training images", "classes", "largest class", "test images", "of classes it never saw"),
            tuple(
                (
                    plain(name),
                    str(held.train[i].sum()),
                    str((held.train[i] > 0).sum()),
                    f"{plain(held.classes[int(held.train[i].argmax())], 20)}, {percent(shares[i].max(), 0)}",
                    str(tested[i]),
                    str(unseen[i]),
                )
                for i, name in enumerate(held.clients)
            ),
        ),
        height=1.3 + 0.16 * max(len(held.clients), 8) if len(held.clients) <= NAMED else 5.0,
    )


def _said_of_split(held: Holdings, unseen: npt.NDArray[np.int64], tested: npt.NDArray[np.int64]) -> str:
    classes = (held.train > 0).sum(axis=1)
    sizes = held.train.sum(axis=1)
    spread = f"{classes.min()} to {classes.max()}" if classes.min() < classes.max() else f"{classes.min()}"
    images = f"{sizes.min()} to {sizes.max()}" if sizes.min() < sizes.max() else f"{sizes.min()}"
    said = "The stronger the colour, the larger the class's share of a client's training images. "
    said += f"Clients hold {images} of them, from {spread} of {len(held.classes)} classes."
    hit = [held.clients[i] for i in np.argsort(-unseen / np.maximum(tested, 1)) if unseen[i]]
    if not hit:
        return f"{said} No client is tested on a class it never saw."
    share = percent(unseen.sum() / tested.sum())
    return f"{said} {share} of all test images are of classes their client never saw: {listed([plain(name) for name in hit])}."


def show_shares(axes: Any, shares: Matrix, colour: str) -> None:
    """An image whose cells are as opaque as their share is large: it fits dark paper as well as light."""
    from matplotlib.colors import to_rgb

    image = np.empty((*shares.shape, 4))
    image[..., :3] = to_rgb(colour)
    image[..., 3] = np.where(shares > 0, 0.06 + 0.94 * np.clip(shares, 0, 1), 0)  # little is more than nothing
    axes.imshow(image, aspect="auto", interpolation="nearest")
    axes.grid(False)


def name_ticks(axis: Any, names: Sequence[str], rotate: bool = False) -> None:
    step = 1 if len(names) <= NAMED else -(-len(names) // 20)
    axis.set_ticks(range(0, len(names), step), [plain(name, 16) for name in names[::step]], rotation=90 if rotate else 0)


def _shares(counts: npt.NDArray[np.int64]) -> Matrix:
    return counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)


# -- likeness ----------------------------------------------------------------------------
def data_likeness(held: Holdings) -> Matrix:
    """(clients, clients) the part that two clients' shares of classes have in common: 1 less half their total difference."""
    shares = _shares(held.train)
    return np.array(1 - np.abs(shares[:, None] - shares[None]).sum(axis=2) / 2)


def architecture_likeness(run: RunView, architectures: Sequence[str]) -> Matrix:
    """(clients, clients) the part of the genes that two architectures have equal, of those with an effect in either."""
    assert run.space is not None
    choices = np.array([Architecture.parse(text).choices for text in architectures])
    active = run.space.active_many(choices)
    either = active[:, None] | active[None]
    equal = (choices[:, None] == choices[None]) & either
    return np.array(equal.sum(axis=2) / np.maximum(either.sum(axis=2), 1))


def likeness_figures(run: RunView) -> list[Shown]:
    titles = ("Likeness of data and of architectures", "Do similar data lead to similar architectures?")
    why = run.no_data or run.no_space
    if not why and len(run.clients) < 3:
        why = "It takes at least three clients with personal models to compare pairs of them."
    if not why and not {client.name for client in run.clients} <= set(run.holdings.clients if run.holdings else ()):
        why = "The names of the clients are not those of the split."
    if not why and len({client.architecture for client in run.clients}) == 1:
        why = "All clients have the same architecture, so there is nothing to compare."
    if why:
        return [Missing(title, why) for title in titles]
    assert run.holdings is not None
    names = [client.name for client in run.clients]
    places = [run.holdings.clients.index(name) for name in names]
    data = data_likeness(run.holdings)[np.ix_(places, places)]
    built = architecture_likeness(run, [client.architecture for client in run.clients])
    order = _neighbours(data)
    return [
        _likeness_map(titles[0], [names[i] for i in order], data[np.ix_(order, order)], built[np.ix_(order, order)]),
        _pairs(titles[1], data, built),
    ]


def _neighbours(likeness: Matrix) -> list[int]:
    """An order in which similar clients stand side by side: leaves of a tree of averages."""
    from scipy.cluster.hierarchy import leaves_list, linkage

    return [int(leaf) for leaf in leaves_list(linkage(above_diagonal(1 - likeness), "average", optimal_ordering=len(likeness) <= 200))]


def _likeness_map(title: str, names: Sequence[str], data: Matrix, built: Matrix) -> Figure:
    below = np.tril(np.ones_like(data, bool), -1)
    above = below.T

    def stretched(values: Matrix) -> Matrix:
        """From 0 for the least alike pair to 1 for the most: both halves use all their shades."""
        pairs = above_diagonal(values)
        low, high = pairs.min(), pairs.max()
        return (values - low) / (high - low) if high > low else np.full_like(values, 0.5)

    def fill(axes: Any) -> None:
        show_shares(axes, np.where(below, stretched(data), 0.0), BLUE)
        show_shares(axes, np.where(above, stretched(built), 0.0), ORANGE)
        axes.plot([-0.5, len(names) - 0.5], [-0.5, len(names) - 0.5], color=FAINT, lw=0.6)
        name_ticks(axes.xaxis, names, rotate=True)
        name_ticks(axes.yaxis, names)

    pairs = {"data": above_diagonal(data), "architectures": above_diagonal(built)}
    ranges = {name: f"from {values.min():.2f} to {values.max():.2f}" for name, values in pairs.items()}
    said = (
        f"Below the diagonal, in blue: how alike two clients' data are ({ranges['data']}). Above it, in orange: how alike their "
        f"architectures are ({ranges['architectures']}). Clients with similar data stand side by side; stronger is more alike."
    )
    nearest = [int(np.where(np.eye(len(names), dtype=bool), -1.0, data)[i].argmax()) for i in range(len(names))]
    rows = tuple(
        (plain(name), plain(names[j]), f"{data[i, j]:.2f}", f"{built[i, j]:.2f}")
        for (i, name), j in zip(enumerate(names), nearest, strict=True)
    )
    numbers = Numbers(("client", "client with the most similar data", "likeness of their data", "of their architectures"), rows)
    axis = Axis("client", "similar data side by side")
    height = min(1.2 + 0.16 * max(len(names), 10), 4.6)
    return Figure("likeness", title, axis, axis, said, fill, numbers, height=height)


def _pairs(title: str, data: Matrix, built: Matrix) -> Figure:
    x, y = above_diagonal(data), above_diagonal(built)
    related = spearman(x, y)
    every = -(-len(x) // MOST_PAIRS)

    def fill(axes: Any) -> None:
        size, alpha = (3, 0.5) if len(x) <= 200 else (2, 0.25)
        draw_dots(axes, x[::every], y[::every], BLUE, size, alpha)

    if related is None:
        said = "All pairs are equally alike in data or in architecture, so neither follows the other."
    else:
        verdict = "Hardly" if abs(related) < 0.1 else "Yes, a little" if abs(related) < 0.3 else "Yes"
        if len(x) < FEW_PAIRS:
            verdict = "Too few to tell"
        elif related <= -0.1:
            verdict = "No, rather the opposite"
        said = f"{verdict}: over {many(len(x), 'pair')} of clients the rank correlation of the two is {correlation(related)}."
    edges = np.quantile(x, [0, 1 / 3, 2 / 3, 1])
    thirds = [(x >= low) & (x <= high) for low, high in pairwise(edges)]
    names = ("least similar third", "middle third", "most similar third")
    rows = tuple(
        (name, f"{x[of].mean():.2f}", f"{y[of].mean():.2f}", str(of.sum())) for name, of in zip(names, thirds, strict=True) if of.any()
    )
    return Figure(
        "likeness-of-pairs",
        title,
        Axis("likeness of data", "shared part of the classes, 0 to 1"),
        Axis("likeness of architectures", "equal genes, 0 to 1"),
        said,
        fill,
        Numbers(("pairs by likeness of data", "mean likeness of data", "mean likeness of architectures", "pairs"), rows),
        thinned=f"One pair in {every} is drawn." if every > 1 else "",
    )
