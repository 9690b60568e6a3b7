"""The site of docs/: every page is in its navigation, every link and anchor leads somewhere, the reference says what the code says.

None of this needs the site's generator. The build itself is `make docs`, and a slow test here.
"""

from __future__ import annotations

import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from fedloom.methods.base import METHODS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def text_of(page: Path) -> str:
    """Without blocks of code, where # and brackets mean other things."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What a link may name after #: headings in small letters, without punctuation, spaces as hyphens."""
    headings = re.findall(r"^#+ +(.+?) *$", text_of(page), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize(("heading", "anchor"), [("# Train your own", "train-your-own"), ("## `a.py`: two, three", "apy-two-three")])
def test_anchors_are_made_as_readers_of_markdown_make_them(heading: str, anchor: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(f"{heading}\n\n```sh\n# no heading\n```\n")
    assert anchors(tmp_path / "page.md") == {anchor}


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = runpy.run_path(str(DOCS / "conf.py"))["NAVIGATION"]
    listed = [name for names in navigation.values() for name in names]
    there = [str(page.relative_to(DOCS).with_suffix("")) for page in sorted(DOCS.rglob("*.md")) if page != DOCS / "index.md"]
    assert sorted(listed) == sorted(there), "NAVIGATION in docs/conf.py must name every page of docs/ but index.md, once"


def test_the_tests_that_the_page_of_threats_names_are_there() -> None:
    text = text_of(DOCS / "explain" / "threats.md")
    files = list((ROOT / "tests").rglob("test_*.py"))
    assert set(re.findall(r"test_\w+\.py", text)) <= {path.name for path in files}
    tests = {name for path in files for name in re.findall(r"def (test_\w+)\(", path.read_text())}
    named = re.findall(r"`(?:[\w/]*test_\w+\.py)?::(test_\w+)", text)
    assert len(named) > 20 and set(named) <= tests


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_and_anchor_leads_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        place = urlsplit(link)
        if place.scheme:
            continue
        target = (page.parent / place.path).resolve() if place.path else page
        there = target.exists() and target.is_relative_to(ROOT)
        if not there or (place.fragment and place.fragment not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_the_first_page_leads_to_every_method_and_space() -> None:
    first = (DOCS / "index.md").read_text()
    pages = [str(page.relative_to(DOCS)) for folder in ("methods", "spaces") for page in sorted((DOCS / folder).glob("*.md"))]
    assert [page for page in pages if f"]({page})" not in first] == []


@pytest.mark.parametrize("method", list(METHODS))
def test_the_page_of_every_method_holds_it_against_its_paper(method: str) -> None:
    """A table: item of the paper, what it is here, how that deviates; and the file that the reader finds it in."""
    text = (DOCS / "methods" / f"{method}.md").read_text()
    assert f"](../../src/fedloom/methods/{method}.py)" in text
    _, found, rest = text.partition("| item of the paper | ours | deviation |\n|---|---|---|\n")
    rows = [re.split(r"(?<!\\)\|", row)[1:-1] for row in rest.partition("\n\n")[0].splitlines()]
    assert found and len(rows) >= 5, "the page needs a table of at least five items"
    for row in rows:
        assert len(row) == 3 and row[0].strip() and row[1].strip(), row
    assert any("ormalisation" in cell for row in rows for cell in row), "how are statistics of normalisation kept?"


@pytest.mark.parametrize("name", ["settings.md", "commands.md", "errors.md", "python.md"])
def test_the_reference_says_what_the_code_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    pages = runpy.run_path(str(DOCS / "generate.py"))["pages"]()
    cure = f"docs/reference/{name} is out of date. Write it again with `python docs/generate.py` (or `make docs`)"
    assert (DOCS / "reference" / name).read_text() == pages[name], cure


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    missing = [name for name in ("sphinx", "myst_parser", "furo") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed: pip install -c constraints.txt -e '.[docs]'")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", tmp_path / "trees", DOCS, site]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > len(list(DOCS.rglob("*.md")))
    for page in pages:
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*?\bsrc=[\"']([^\"']+)", page.read_text())
        loaded += re.findall(r"<link\b[^>]*?\bhref=[\"']([^\"']+)", page.read_text())
        outside = [address for address in loaded if re.match(r"(https?:)?//", address)]
        assert outside == [], page
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", style.read_text()), style
