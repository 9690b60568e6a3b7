"""Whole pages: they are all there is, small enough, and a real browser finds everything, asks for nothing and complains of nothing."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from html import unescape
from pathlib import Path

import pytest
from PIL import Image

from fedloom.report.figure import Figure
from fedloom.report.neighbours import baselines_of
from fedloom.report.page.several import comparison_figures, comparison_page
from fedloom.report.page.single import figures_of, page
from fedloom.report.reading import open_run
from support.browser import CHROMIUM, HOW_TO_GET_IT, Browser
from support.report import Outline, made_up_run

DESKTOP, PHONE = 1280, 390
SECTIONS = "[...document.querySelectorAll('main section')].map(s => [s.id, s.innerText.trim().length, s.getBoundingClientRect().height])"
PICTURES = "[...document.querySelectorAll('figure > svg')].map(s => s.getBoundingClientRect().height)"
WIDTH = "document.documentElement.scrollWidth"
LETTERS = "Math.min(...[...document.querySelectorAll('figure > svg text')].map(t => t.getBoundingClientRect().height))"


def ink_and_paper(picture: Path) -> tuple[float, float]:
    """Brightness of the darkest and the commonest pixel."""
    histogram = Image.open(picture).convert("L").histogram()
    return next(level for level, times in enumerate(histogram) if times > 20), histogram.index(max(histogram))


@dataclass(frozen=True)
class Made:
    text: str
    figures: list[Figure]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    place = tmp_path_factory.mktemp("reported")
    runs = [made_up_run(place / "runs" / method, method, clients=6, rounds=5) for method in ("perfedsde", "local", "fedavg")]
    views = [open_run(run) for run in runs]
    large = made_up_run(place / "large", clients=100, rounds=1500, participants=5)
    start = time.perf_counter()
    view = open_run(large)
    drawn = Made(page(view, []), figures_of(view, []))
    assert time.perf_counter() - start < 60  # about four seconds of a core; machines that test are busy
    others = baselines_of(runs[0])
    single = Made(page(views[0], others), figures_of(views[0], others))
    return {"single": single, "several": Made(comparison_page(views), comparison_figures(views)), "large": drawn}


@pytest.fixture
def pages(made: dict[str, Made]) -> dict[str, str]:
    return {name: one.text for name, one in made.items()}


def test_every_figure_is_there_with_its_words(made: dict[str, Made]) -> None:
    assert [len(one.figures) for one in made.values()] == [16, 9, 15]  # the large run has no local beside it
    for one in made.values():
        assert len({figure.key for figure in one.figures}) == len(one.figures)  # names of links and files
        for figure in one.figures:
            block = re.search(rf'<figure id="figure-{figure.key}".*?</figure>', one.text, re.DOTALL)
            assert block is not None, figure.key
            drawn = block[0][block[0].index("<svg") : block[0].index("</svg>")]
            words = [unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", drawn)]
            assert str(figure.horizontal) in words and str(figure.vertical) in words, figure.key
            assert unescape(block[0]).count(figure.see) == 2 and figure.title in block[0], figure.key  # once to read, once to listen to
            assert not re.search(r"\bnan\b", block[0]) and "#1b1b1a" not in drawn, figure.key  # ink is the style sheet's
            rows, columns = figure.numbers.rows, figure.numbers.columns
            assert rows and {len(row) for row in rows} == {len(columns)}, figure.key


def test_a_page_is_all_there_is(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        outline = Outline(text)
        assert not {"script", "iframe", "object", "embed", "form", "base"} & outline.tags, name
        assert "default-src &#x27;none&#x27;" in text and "@import" not in text
        addresses = re.findall(r'(?:src|href|action)\s*=\s*["\']?([^"\'\s>]+)|url\(([^)]+)\)', text)
        assert addresses and all(one.startswith(("#", "data:")) for pair in addresses for one in pair if one), name
        assert len(outline.ids) == len(set(outline.ids)) and set(re.findall(r'href="#([^"]+)"', text)) <= set(outline.ids), name


def test_a_hundred_clients_and_fifteen_hundred_rounds_stay_small(pages: dict[str, str]) -> None:
    text = pages["large"]
    assert len(text.encode()) < 2_500_000  # and may have 5 MB
    assert "Each point stands for 13 rounds." in text and "One pair in 4 is drawn." in text
    assert text.count('class="card"') == 100


@pytest.mark.skipif(CHROMIUM is None, reason=HOW_TO_GET_IT)
def test_pages_in_chromium(pages: dict[str, str], tmp_path: Path) -> None:
    for name, text in pages.items():
        (tmp_path / f"{name}.html").write_text(text)
    with Browser(tmp_path / "profile") as browser:
        for name in pages:
            for width in (DESKTOP, PHONE):
                seconds = browser.open(tmp_path / f"{name}.html", width)
                who = f"{name} at {width}"
                assert browser.requests == [] and browser.complaints == [], who
                assert all(words > 40 and height > 40 for _, words, height in browser.value(SECTIONS)), who
                heights = browser.value(PICTURES)
                assert len(heights) >= 7 and min(heights) > 80, who
                assert browser.value(WIDTH) <= width, f"{who} runs over the edge"
                assert browser.value(LETTERS) > 7, f"{who} has letters too small to read"
                if seconds > 1:  # the machine was busy: once more
                    seconds = browser.open(tmp_path / f"{name}.html", width)
                assert seconds < 2, f"{who} took {seconds:.1f} s to open"
                shot = tmp_path / f"{name}-{width}.png"
                browser.screenshot(shot)
                assert Image.open(shot).size == (width, 900)
                darkest, commonest = ink_and_paper(shot)
                assert darkest < 60 and commonest > 240, who
        browser.open(tmp_path / "single.html", DESKTOP, dark=True)
        browser.screenshot(tmp_path / "dark.png")
        assert ink_and_paper(tmp_path / "dark.png")[1] < 40
        assert browser.value("getComputedStyle(document.querySelector('figure > svg text')).fill") == "rgb(233, 231, 225)"
        assert len(browser.ask("Page.printToPDF")["data"]) > 50_000
        # what keyboards and screen readers go by
        assert browser.value("[...document.querySelectorAll('main,nav,header,footer')].length") == 4
        assert browser.value("[...document.querySelectorAll('figure > svg')].every(s => s.getAttribute('aria-label').length > 40)")
        assert browser.value("[...document.querySelectorAll('.scroll')].every(s => s.tabIndex === 0 && s.getAttribute('aria-label'))")
        assert browser.value("document.querySelectorAll('h1').length") == 1
        # proof that complaints and requests would have been noticed
        (tmp_path / "bad.html").write_text("<img src='https://example.invalid/x.png'><script>throw Error('oh')</script>")
        browser.open(tmp_path / "bad.html", DESKTOP)
        assert browser.requests == ["https://example.invalid/x.png"] and any("oh" in complaint for complaint in browser.complaints)
