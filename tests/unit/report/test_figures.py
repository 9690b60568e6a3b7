"""Figures of a report: what they must say, what they are drawn as, and that what they say is true."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.report.charts.clients import client_bars
from fedloom.report.charts.comparison import groups_of, pairs
from fedloom.report.charts.data import data_likeness
from fedloom.report.charts.rounds import accuracy_over_rounds, binned, thinning
from fedloom.report.figure import Axis, Figure, Missing, Numbers, page_svg, pictures
from fedloom.report.neighbours import baselines_of
from fedloom.report.page.single import figures_of
from fedloom.report.reading import open_run
from fedloom.report.view import Holdings, RunView
from fedloom.report.words import byte_count, count, duration, listed, plain, points
from support.report import made_up_run

FIGURE = Figure(
    "key", "A title", Axis("x", "s"), Axis("y", "%"), "There is a line.", lambda axes: axes.plot([1, 2]), Numbers(("x",), (("1",),))
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same four clients by three methods."""
    place = tmp_path_factory.mktemp("runs")
    own = {"perfedsde": [0.9, 0.8, 0.7, 1.0], "local": [0.5, 0.9, 0.7, 0.8], "fedavg": [0.9, 0.85, 0.7, 0.95]}
    return {method: made_up_run(place / f"{method}-0", method, accuracies=values) for method, values in own.items()}


@pytest.fixture(scope="module")
def run(folders: dict[str, Path]) -> RunView:
    return open_run(folders["perfedsde"])


@pytest.mark.parametrize(
    "lacking",
    [
        {"title": " "},
        {"key": ""},
        {"horizontal": Axis("", "s")},
        {"horizontal": Axis("time", "")},
        {"vertical": Axis("", "%")},
        {"vertical": Axis("accuracy", " ")},
        {"see": ""},
        {"see": "a remark that is no sentence"},
        {"width": "double"},
    ],
    ids=str,
)
def test_no_figure_without_title_axes_units_and_a_sentence(lacking: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="figure"):
        replace(FIGURE, **lacking)


def test_files_for_papers_keep_text_as_text_and_repeat() -> None:
    files = pictures(FIGURE)
    assert set(files) == {"svg", "png", "pdf"} and files == pictures(FIGURE)
    assert b">A title</text>" in files["svg"] and b">y (%)</text>" in files["svg"] and b"var(--" not in files["svg"]
    assert files["png"].startswith(b"\x89PNG") and files["pdf"].startswith(b"%PDF")
    assert b"/CIDFontType2" in files["pdf"] and b"/Type3" not in files["pdf"]  # fonts a printer knows, not drawings of letters


def test_parts_of_figures_have_names_of_their_own() -> None:
    first, second = (page_svg(replace(FIGURE, key=key)) for key in ("a", "b"))
    ids = [set(re.findall(r'id="([^"]+)"', text)) for text in (first, second)]
    assert ids[0] and not ids[0] & ids[1]
    for text, own in zip((first, second), ids, strict=True):
        assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', text)) <= own


# -- what they say -----------------------------------------------------------------------


def test_bars_say_who_is_worse_off_than_alone(folders: dict[str, Path], run: RunView) -> None:
    figure = client_bars(run, baselines_of(folders["perfedsde"]))
    assert isinstance(figure, Figure)
    said = figure.see.replace("\u00a0", " ")
    assert said.startswith("From 100.0 % (client-003) down to 70.0 % (client-002). 2 of 4 clients are better off than by training alone")
    assert said.endswith("; worse off: client-001.")
    rows = {row[0]: row for row in figure.numbers.rows}
    column = figure.numbers.columns.index("gain over local, points")
    assert [rows[f"client-00{number}"][column] for number in range(4)] == ["+40.0", "−10.0", "0.0", "+20.0"]
    assert [row[0] for row in figure.numbers.rows] == ["client-003", "client-000", "client-001", "client-002"]


def test_a_long_course_is_thinned_and_says_so() -> None:
    course = {number: [number / 1000, number / 1000 + 0.1] for number in range(1000)}
    bins = binned(course, most=120)
    assert len(bins) <= 120 and (bins[0].first, bins[-1].last) == (1, 1000)
    assert sum(len(one.values) for one in bins) == 2000  # every measurement is in some point
    assert thinning(bins, course) == "Each point stands for 9 rounds." and bins[0].name == "1–9"
    assert np.isclose(bins[0].mean, 0.05 + np.mean(range(9)) / 1000)
    assert thinning(binned({0: [1.0]}), {0: [1.0]}) == "" and binned({}) == []


def test_likeness_of_data_is_the_shared_part() -> None:
    held = Holdings(("a", "b", "c"), ("x", "y"), np.array([[4, 0], [1, 1], [0, 2]]), np.array([[1, 1], [1, 0], [1, 1]]))
    assert np.allclose(data_likeness(held), [[1, 0.5, 0], [0.5, 1, 0.5], [0, 0.5, 1]])
    assert held.unseen.tolist() == [[False, True], [False, False], [True, False]]


def test_runs_are_paired_by_seed_and_split_only(folders: dict[str, Path], tmp_path: Path) -> None:
    runs = [open_run(folders["perfedsde"]), open_run(folders["local"])]
    first, second = groups_of(runs)
    assert sorted(pairs(first, second)) == [(0.7, 0.7), (0.8, 0.9), (0.9, 0.5), (1.0, 0.8)]
    elsewhere = open_run(made_up_run(tmp_path / "a", "local", overrides=["split.size=44"]))
    assert pairs(first, groups_of([elsewhere])[0]) == []
    alike = groups_of([runs[0], replace(runs[0], folder="elsewhere/other")])  # one method, one seed: told apart by their folders
    assert [group.name for group in alike] == ["perfedsde-0", "other"]


def test_what_cannot_be_drawn_says_why(run: RunView) -> None:
    empty = replace(run, clients=(), course=type(run.course)(), finished=False)
    assert isinstance(client_bars(empty, []), Missing) and isinstance(accuracy_over_rounds(empty, []), Missing)
    assert figures_of(replace(empty, holdings=None, no_data="gone"), []) == []


# -- numbers as words ----------------------------------------------------------------------


def test_numbers_are_written_as_people_do() -> None:
    assert [points(share) for share in (0.0123, -0.0123, -0.0001, None)] == ["+1.2", "−1.2", "0.0", "–"]
    shown = [byte_count(n) for n in (0, 999, 1500, 84_100_000)] + [count(n) for n in (12, 9999, 15_000, 9.18e9)]
    assert [text.replace("\u00a0", " ") for text in shown] == [
        "0 B",
        "999 B",
        "1.50 kB",
        "84.1 MB",
        "12",
        "9,999",
        "15.0 thousand",
        "9.18 billion",
    ]
    times = [duration(s).replace("\u00a0", " ") for s in (0.25, 89.2, 119.96, 600, 10_000)]
    assert times == ["250 ms", "89.2 s", "120 s", "10 min 0 s", "2 h 46 min"]
    assert listed(["a"]) == "a" and listed(["a", "b", "c"]) == "a, b and c" and listed(list("abcdef"), 2) == "a, b and 4 more"
    assert plain("a\x00\n\ud800b" + "c" * 100, 10) == "a\ufffd \ufffdbcccc…"
