"""How Sphinx makes a site of these pages (`make docs`). NAVIGATION is the order in which they are read; every page is in it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

NAVIGATION = {
    "Start": ["start/install", "start/quickstart", "start/hospitals", "start/examples", "start/features"],
    "Results": ["results"],
    "How to": [
        "how-to/own-images",
        "how-to/report",
        "how-to/compare",
        "how-to/export",
        "how-to/analyses",
        "how-to/budgets",
        "how-to/hardware",
        "how-to/workers",
        "how-to/slurm",
        "how-to/federation",
        "how-to/own-method",
        "how-to/own-space",
        "how-to/foreign-weights",
    ],
    "Methods": [
        "methods/perfedsde",
        "methods/perfedrlnas",
        "methods/spider",
        "methods/hapfnas",
        "methods/fednas",
        "methods/fedrlnas",
        "methods/fedoras",
        "methods/heterofl",
        "methods/fedavg",
        "methods/fedprox",
        "methods/fedrep",
        "methods/fedbabu",
        "methods/ditto",
        "methods/scaffold",
        "methods/perfedavg",
        "methods/knnper",
        "methods/fedala",
        "methods/dbe",
        "methods/fedmn",
        "methods/fedtp",
        "methods/local",
    ],
    "Search spaces": ["spaces/mobilenetv3", "spaces/darts", "spaces/nasvit", "spaces/networks"],
    "Explain": [
        "explain/architecture",
        "explain/search",
        "explain/personal",
        "explain/numbers",
        "explain/generator",
        "explain/generator-numbers",
        "explain/executions",
        "explain/speed",
        "explain/flower",
        "explain/threats",
        "explain/privacy",
        "explain/secure",
        "explain/dependencies",
    ],
    "Reference": ["reference/commands", "reference/settings", "reference/run-folder", "reference/errors", "reference/python"],
}

project = "Fedloom"
version = release = re.findall(r'__version__ = "(.*)"', (Path(__file__).parents[1] / "src" / "fedloom" / "__init__.py").read_text())[0]
extensions = ["myst_parser"]
smartquotes = False  # would make one dash of the two before an option

myst_heading_anchors = 4  # [text](page.md#a-heading) works, as it does where the files are read without a site

html_theme = "furo"
html_title = f"Fedloom {release}"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_use_index = False
pygments_style = "friendly"
pygments_dark_style = "monokai"


def setup(app: Any) -> None:
    app.connect("source-read", copy_other_pages)
    app.connect("source-read", add_navigation)


def copy_other_pages(app: Any, page: str, source: list[str]) -> None:
    """Files outside this folder that a page links to are copied beside the site; a page of Markdown must be told apart from those here."""
    up = "../" * (page.count("/") + 1)
    source[0] = re.sub(rf"\]\(({re.escape(up)}[^)#]*\.md)(#[^)]*)?\)", r"](path:\1)", source[0])


def add_navigation(app: Any, page: str, source: list[str]) -> None:
    """NAVIGATION as the site's tree of pages, at the end of the first page: its file stays plain Markdown."""
    if page == "index":
        trees = ("\n".join(["```{toctree}", ":hidden:", f":caption: {part}", *pages, "```"]) for part, pages in NAVIGATION.items())
        source[0] += "\n\n" + "\n\n".join(trees)
