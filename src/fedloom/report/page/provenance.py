"""How it was made: settings, seed, versions, commit."""

from __future__ import annotations

from typing import Any

from fedloom.report.figure import Numbers
from fedloom.report.page.blocks import facts, folded, missing, numbers_table
from fedloom.report.page.html import Html, code, tag
from fedloom.report.view import RunView
from fedloom.report.words import plain

PROTOCOLS = {
    "paper": "paper: models are selected on test data, as the papers did, so accuracies are optimistic",
    "clean": "clean: validation data select, test data report",
}
COMMON = ("data", "split", "training", "budget", "hardware", "run")


def provenance_blocks(run: RunView) -> list[Html]:
    environment = {name: plain(value, 120) for name, value in run.environment.items()}
    rows: list[tuple[str, object]] = [
        ("method", run.method),
        ("search space", run.space_name),
        ("data set", run.dataset),
        ("protocol", PROTOCOLS.get(run.protocol, PROTOCOLS["clean"])),
        ("seed", run.seed),
        ("clients", f"{run.client_count}, {run.participants} in a round"),
        ("state", run.spoken_state),
        ("run folder", plain(run.folder, 300)),
        *environment.items(),
    ]
    used = {key: value for key, value in run.settings.items() if _used(run, key)}
    changed = {key: value for key, value in used.items() if key in run.defaults and run.defaults[key][0] != value}
    blocks = [facts(rows)]
    if not run.environment:
        blocks.append(missing("Versions and commit are written with the first checkpoint, and there is none yet."))
    rehearse = "fedloom serve FEDERATION.toml --rehearse IMAGES"  # whose images are at the sites
    command = rehearse if run.federation else f"fedloom run {plain(run.folder, 300)}/config.toml run.folder=ANOTHER"
    again = tag("p", "The same again, with all images on one machine: " if run.federation else "The same again: ", code(command))
    return [
        *blocks,
        again,
        _table(run, changed, "Settings that are not the defaults", True),
        _table(run, used, "All settings of this run", False),
    ]


def _used(run: RunView, key: str) -> bool:
    """Whether a setting belongs to what the run is made of, and not to another method, space or engine."""
    table, dot, _ = key.partition(".")
    return not dot or table in (*COMMON, run.method, run.space_name, run.settings.get("engine"))


def _table(run: RunView, settings: dict[str, Any], title: str, open_: bool) -> Html:
    rows = tuple(
        (plain(key), shown(value), plain(run.defaults[key][1], 400) if key in run.defaults else "–") for key, value in settings.items()
    )
    return folded(f"{title} ({len(rows)})", numbers_table(Numbers(("setting", "value", "meaning"), rows), title), open_=open_)


def shown(value: Any) -> str:
    """A setting's value for people."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value)) or "none"
    return plain(value, 200) or "none"
