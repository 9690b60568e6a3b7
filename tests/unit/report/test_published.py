"""Numbers of papers: right, beside runs of the same data set, and never taken for ours."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fedloom.data.readers import DATASETS
from fedloom.report.comparison import comparison_card
from fedloom.report.comparison_files import table_file
from fedloom.report.page.published import published_block
from fedloom.report.published import TITLE, published, published_beside
from fedloom.report.reading import open_run
from fedloom.report.terminal.comparison import published_notes
from fedloom.spaces.base import SPACES
from support.checks import Fedloom
from support.report import made_up_run


@pytest.mark.parametrize(
    ("method", "what", "dataset", "space", "shown"),
    [  # read off the papers again
        ("perfedrlnas", "searched", "cifar10", "nasvit", "85.02 ± 4.11"),
        ("perfedsde", "searched", "cifar100", "nasvit", "65.94 ± 4.42"),
        ("perfedsde", "without Eq. 5 and diffusion", "cifar10", "mobilenetv3", "79.42 ± 5.59"),
        ("fedrlnas", "searched, one for all", "cifar100", "darts", "60.85 ± 4.43"),
        ("spider", "searched", "cinic10", "darts", "87.25 ± 3.50"),
        ("fednas", "searched by perturbation at the server, one for all", "cifar100", "darts", "68.03"),
        ("ditto", "ResNet-18", "cifar100", "darts", "61.06 ± 2.40"),
    ],
)
def test_numbers(method: str, what: str, dataset: str, space: str, shown: str) -> None:
    assert (method, what, dataset, space, shown) in {(one.method, one.what, one.dataset, one.space, one.shown) for one in published()}


def test_every_row_has_a_source_a_protocol_and_names_of_ours() -> None:
    rows = published()
    assert len(rows) == len({(one.method, one.what, one.dataset, one.space, one.source) for one in rows}) > 80
    for one in rows:
        assert one.dataset in DATASETS and one.space in SPACES and "clients" in one.protocol
        assert re.search(r"Table|text|appendix", one.source) and 0.3 < one.accuracy < 1 and (one.spread or 0.1) < 0.14
    assert not [one for one in rows if one.method == "hapfnas"]  # whose tables could not be read


def test_beside_stands_what_is_about_the_same() -> None:
    assert published_beside({"digits"}, {"darts"}, {"spider"}) == []
    found = published_beside({"cinic10"}, {"mobilenetv3"}, {"ditto"})
    assert {one.method for one in found} == {"ditto"} and [one.accuracy for one in found] == [0.8361, 0.8042]
    assert {one.method for one in published_beside({"cinic10"}, {"darts"}, {"local"})} > {"spider", "knnper"}
    mixed = published_beside({"cifar10"}, {"darts"}, {"spider"})
    notes = published_notes(mixed).splitlines()
    assert len(notes) == 2 and notes[0].startswith("(a) 100 clients") and notes[1].startswith("(b) 8 clients")


def test_tables_tell_them_from_runs() -> None:
    result = {"accuracy": {"mean": 0.5, "std": 0.1}, "clients": [], "cost": {"seconds": 1.0, "bytes_up": 0}}
    card = {**comparison_card({"spider": {0: result}}), "published": published_beside({"cinic10"}, {"darts"}, {"spider"})}
    rows = list(csv.DictReader(table_file(Path("t.csv"), card).splitlines()))
    assert [row["origin"] for row in rows] == ["run", *["published"] * 7]
    assert rows[1]["accuracy_percent"] == "87.250" and rows[1]["source"].startswith("SPIDER, Mushtaq") and rows[1]["p"] == ""
    for kind, begin in (("md", "| published for |"), ("tex", "published for &")):
        ours, theirs = table_file(Path(f"t.{kind}"), card).split(TITLE)
        assert begin in theirs and "87.25" in theirs and "87.25" not in ours and "8 clients" in theirs


def test_pages_have_them_folded(tmp_path: Path) -> None:
    run = open_run(made_up_run(tmp_path / "run", "local"))
    assert published_block([run]) == ""  # digits are in no paper
    object.__setattr__(run, "dataset", "cifar10")
    assert f"<details><summary>{TITLE}</summary>" in published_block([run]) and "MobileNetV3-Large" in published_block([run])


def test_compare_prints_them_apart(orders: Callable[..., None], fedloom_: Fedloom, tiny_file: Path) -> None:
    orders({"local-0": {"dataset": "cifar10"}})
    told = fedloom_("compare", tiny_file, "--methods", "local")
    ours, theirs = told.out.split(f"{TITLE}:\n")
    assert "57.60" in theirs and "57.60" not in ours and "(a) 100 clients, 5 of them in each round" in theirs
    card = json.loads(fedloom_("compare", tiny_file, "--methods", "local", "run.folder=other", "--json").out)
    assert {one["method"] for one in card["published"]} == {"local"} and all("Table 2" in one["source"] for one in card["published"])
    orders({})
    assert TITLE not in fedloom_("compare", tiny_file, "--methods", "local", "run.folder=third").out
