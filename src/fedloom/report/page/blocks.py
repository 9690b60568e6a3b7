"""The pieces that pages are built of: figures with their words and numbers, tables, sections, and the page around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

import fedloom
from fedloom.report.figure import Figure, Missing, Numbers, Shown, page_svg
from fedloom.report.page.html import Html, joined, tag, ticked

# Nothing may be fetched and nothing may run: the page is all there is.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True)
class Section:
    key: str
    title: str
    lead: str  # what the section is about, in a sentence
    blocks: Callable[[], Sequence[Html]]  # called by whoever wants the page: drawing takes time
    figures: Sequence[Shown] = field(default_factory=tuple)  # that are among the blocks

    def to_html(self) -> Html:
        heading = tag("h2", self.title, id=f"{self.key}-title")
        return tag(
            "section", heading, tag("p", ticked(self.lead), class_="lead"), *self.blocks(), id=self.key, aria_labelledby=f"{self.key}-title"
        )


def gallery(shown: Sequence[Shown]) -> Html:
    """Figures side by side where there is room."""
    wide = "half" if any(isinstance(one, Figure) and one.width == "half" for one in shown) else "third"
    return tag("div", *map(figure_block, shown), class_=f"gallery {wide}")


def beside(left: Html, right: Html) -> Html:
    return tag("div", tag("div", left), right, class_="gallery half")


def figure_block(shown: Shown) -> Html:
    if isinstance(shown, Missing):
        return tag("div", tag("h3", shown.title), missing(shown.why), class_="figure empty")
    words = [tag("h3", shown.title, id=f"figure-{shown.key}-title"), tag("p", shown.see)]
    thinned = tag("p", shown.thinned, class_="small") if shown.thinned else None
    return tag(
        "figure",
        tag("figcaption", *words, thinned),
        Html(page_svg(shown)),
        folded("The numbers", numbers_table(shown.numbers, shown.title)),
        id=f"figure-{shown.key}",
        class_="figure",
        aria_labelledby=f"figure-{shown.key}-title",
    )


def missing(why: str, element: str = "p") -> Html:
    return tag(element, tag("strong", "Missing. "), ticked(why), class_="missing")


def folded(summary: str, *inside: Html, open_: bool = False) -> Html:
    return tag("details", tag("summary", summary), *inside, open=open_)


def numbers_table(numbers: Numbers, title: str) -> Html:
    """Columns of numbers are set to the right; the first column names its row."""
    right = [i > 0 and all(_is_number(row[i]) for row in numbers.rows if i < len(row)) for i in range(len(numbers.columns))]
    head = tag("tr", *(tag("th", name, scope="col", class_="number" if right[i] else None) for i, name in enumerate(numbers.columns)))
    rows = []
    for row in numbers.rows:
        cells = [tag("td", cell, class_="number" if right[i + 1] else None) for i, cell in enumerate(row[1:])]
        rows.append(tag("tr", tag("th", row[0], scope="row"), *cells))
    table = tag("table", tag("caption", title), tag("thead", head), tag("tbody", *rows))
    return scrolling(table, title)


def scrolling(inside: Html, title: str) -> Html:
    """Wider than a phone: it scrolls by itself, with the keyboard as well."""
    return tag("div", inside, class_="scroll", tabindex="0", role="region", aria_label=f"{title}, table")


def _is_number(text: str) -> bool:
    return text[:1].lstrip("+−–-").isdigit() or text[:1] in "+−–-" if text else True


def facts(rows: Sequence[tuple[str, object]]) -> Html:
    return tag("dl", *(joined(tag("dt", name), tag("dd", value)) for name, value in rows), class_="facts")


@cache
def style_sheet() -> str:
    return files("fedloom.report.page").joinpath("style.css").read_text()


def document(title: str, header: Html, summary: Html, sections: Sequence[Section]) -> str:
    """The whole page."""
    links = [tag("li", tag("a", section.title, href=f"#{section.key}")) for section in sections]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content=f"fedloom {fedloom.__version__}"),
        tag("title", title),
        tag("link", rel="icon", href="data:,"),
        tag("style", Html(style_sheet())),
    )
    body = tag(
        "body",
        tag("a", "Skip to the report", href="#report", class_="skip"),
        tag("header", header),
        tag("nav", tag("ul", *links), aria_label="Sections"),
        tag("main", summary, *(section.to_html() for section in sections), id="report"),
        tag("footer", tag("p", f"Made by fedloom {fedloom.__version__}. This page is one file: it loads nothing and sends nothing.")),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"
