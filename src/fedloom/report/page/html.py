"""HTML from Python: whatever is not HTML already is escaped, so nothing a run says can become part of the page."""

from __future__ import annotations

from html import escape

from fedloom.report.words import NOT_XML

VOID = {"br", "meta", "link", "img"}


class Html(str):
    """Text that is HTML; made here, and by those who write it out themselves."""


def tag(element: str, *inside: object, **attributes: object) -> Html:
    """An element. Attributes lose a trailing _ and have - for _; those that are None or False are left out."""
    shown = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        shown.append(f" {key}" if value is True else f' {key}="{escape(_clean(value))}"')
    opening = f"<{element}{''.join(shown)}>"
    return Html(opening if element in VOID else f"{opening}{joined(*inside)}</{element}>")


def joined(*parts: object) -> Html:
    return Html("".join(part if isinstance(part, Html) else escape(_clean(part), quote=False) for part in parts if part is not None))


def code(text: object) -> Html:
    return tag("code", text)


def ticked(text: str) -> Html:
    """A sentence whose `commands` are set as such."""
    pieces = text.split("`")
    return joined(*(code(piece) if i % 2 and i < len(pieces) - 1 else piece for i, piece in enumerate(pieces)))


def _clean(text: object) -> str:
    return NOT_XML.sub("\ufffd", str(text))
