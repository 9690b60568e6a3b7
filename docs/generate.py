"""Write the reference pages from settings, commands, errors and docstrings: `python docs/generate.py`. `make docs` does so too."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import click
import typer
from entrances import python_page
from markup import code, plain, table

from fedloom import config
from fedloom.commands import app as cli
from fedloom.core import errors
from fedloom.data.readers import DATASETS
from fedloom.engine.base import ENGINES
from fedloom.federation.agreement import Members, ServerSettings, SiteSettings
from fedloom.generator.pretrain import PretrainSettings
from fedloom.methods.base import METHODS
from fedloom.spaces.base import SPACES

FOLDER = Path(__file__).parent / "reference"
SETTINGS = """\
A settings file is TOML. `key=value` on the command line overrides it. A preset is a settings file that is included in Fedloom.
There is one rule: a name picks a component, and a table with that name holds its settings. `method = "fedavg"` picks a method,
`[fedavg]` or `fedavg.averaging=median` sets its settings. Settings that you do not name keep their default. A key that does not
exist or a value that does not fit is refused with one sentence (exit code 3).

`base = "quickstart"` in a file starts from a preset or another file and changes it. A table `[when.METHOD]` holds settings for one
method only.
"""
GENERATOR = """\
## Your own generator

`fedloom pretrain SPACE key=value …` has these settings. `data.*` and the settings of the space can be set too.
"""
FEDERATION = """\
## A federation over a network

`fedloom serve FEDERATION.toml` reads all settings above from that file, and two more tables. `fedloom site SITE.toml` has its own
file.

### FEDERATION.toml
"""
COMMANDS = """\
`fedloom COMMAND --help` (or `-h`) prints the same in the terminal, `fedloom --version` the version. `fedloom --install-completion`
teaches your shell to complete names of commands and options. `--trace` after any command shows where an error came from. [What can go
wrong](errors.md) has the exit codes. Where a command takes `key=value`, you can set any of the [settings](settings.md), unless its
help says otherwise.
"""
ERRORS = """\
When Fedloom refuses something, it says in one or two sentences what is wrong, where, and how to cure it. Each kind of error has its
own exit code. In Python each is an exception of `fedloom.core.errors`, and `error.facts` holds the facts behind the sentence.
`--trace` after any command shows where the error came from.
"""
NOTE = "\n_Written by `python docs/generate.py` from the code. Change the code, not this page._\n"


def pages() -> dict[str, str]:
    """File name -> text of every page that is generated."""
    made = {"settings.md": settings_page, "commands.md": commands_page, "errors.md": errors_page, "python.md": python_page}
    return {name: "\n".join(page()).rstrip() + "\n" + NOTE for name, page in made.items()}


# -- settings ---------------------------------------------------------------------------
def settings_page() -> Iterator[str]:
    yield "# Settings\n"
    yield SETTINGS
    for name, rows in grouped(config.Settings, "").items():
        yield from settings_table(name or "At the top", rows)
        if name == "data":
            yield from table(["`data.name`", "what"], ((code(key), plain(entry.meaning)) for key, entry in DATASETS.items()))
    for title, folder, registry in (("Methods", "methods", METHODS), ("Search spaces", "spaces", SPACES)):
        yield f"## {title}\n"
        for entry in registry.values():
            yield f"### {entry.name}\n\n{plain(entry.meaning)} ([page](../{folder}/{entry.name}.md)).\n"
            yield from settings_tables(entry.settings, f"{entry.name}.")
    yield "## Engines\n"
    for name, entry in ENGINES.items():
        yield f"### {name}\n\n{plain(entry.meaning)}.\n"
        yield from settings_tables(entry.settings, f"{name}.")
    yield "## Presets\n"
    yield from table(["preset", "what"], ((code(name), plain(meaning)) for name, meaning in config.presets().items()))
    yield GENERATOR
    yield from settings_tables(PretrainSettings, "")
    yield FEDERATION
    yield from settings_tables(Members, "federation.")
    yield from settings_tables(ServerSettings, "server.")
    yield "### SITE.toml\n"
    yield from settings_tables(SiteSettings, "")


Row = tuple[str, str, str]


def grouped(kind: type, prefix: str) -> dict[str, list[Row]]:
    """Table's name -> (key, default, meaning) of its settings, the limits of a value at the end of its meaning."""
    found: dict[str, list[Row]] = {}
    for (key, default, meaning), limit in zip(config.explain_table(kind, prefix), limits(kind), strict=True):
        found.setdefault(key.rpartition(".")[0], []).append((key, default, meaning + limit))
    return found


def limits(kind: type) -> Iterator[str]:
    """What is said of the limits of each setting, in the order of config.explain_table."""
    hints = get_type_hints(kind)
    for item in fields(kind):
        if is_dataclass(hints[item.name]):
            yield from limits(hints[item.name])
        elif "meaning" in item.metadata:
            low, high = item.metadata["low"], item.metadata["high"]
            bounds = [f"{word} {value:g}" for word, value in (("at least", low), ("at most", high)) if value is not None]
            yield f"; {' and '.join(bounds)}" if bounds else ""


def settings_table(title: str, rows: list[Row]) -> Iterator[str]:
    yield from [f"## {title}\n"] if title else []
    yield from table(["setting", "default", "meaning"], ((code(key), code(default), plain(meaning)) for key, default, meaning in rows))


def settings_tables(kind: type, prefix: str) -> Iterator[str]:
    tables = grouped(kind, prefix)
    for rows in tables.values():
        yield from settings_table("", rows)
    if not tables:
        yield "It has no settings.\n"


# -- commands ------------------------------------------------------------------------------
def commands_page() -> Iterator[str]:
    yield "# Commands\n"
    yield COMMANDS
    group: Any = typer.main.get_command(cli.app)
    commands = list(every_command("fedloom", group))
    yield from table(["command", "does"], ((f"[`{name}`](#{name.replace(' ', '-')})", plain(paragraphs(one)[0])) for name, one in commands))
    for name, command in commands:
        yield from command_section(name, command)


def every_command(name: str, group: click.Group) -> Iterator[tuple[str, click.Command]]:
    for key, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from every_command(f"{name} {key}", command)
        else:
            yield f"{name} {key}", command


def paragraphs(command: click.Command) -> list[str]:
    return inspect.cleandoc(command.help or "").split("\n\n")


def command_section(name: str, command: click.Command) -> Iterator[str]:
    arguments = [one for one in command.params if isinstance(one, click.Argument)]
    options = [one for one in command.params if isinstance(one, click.Option)]
    words = [shown(one) for one in arguments]
    yield f"## {name}\n\n```\n{' '.join([name, *words, *(['[options]'] if options else [])])}\n```\n"
    yield "\n\n".join(map(plain, paragraphs(command))) + "\n"
    rows = [(code(shown(one)), plain(getattr(one, "help", None) or "")) for one in arguments]
    for option in options:
        value = "" if option.is_flag else f" {option.metavar or kind_of(option)}"
        default = option.default if option.default not in (None, "", False) and not option.required else None
        said = [*(["required"] if option.required else []), *([f"default: {default}"] if default is not None else [])]
        rows.append((code(option.opts[0] + value), "; ".join([plain(option.help or ""), *map(plain, said)])))
    if rows:
        yield from table(["", "meaning"], rows)


def shown(argument: click.Argument) -> str:
    name = argument.metavar or (argument.name or "").upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def kind_of(option: click.Option) -> str:
    return {"integer": "N", "integer range": "N", "float": "X", "float range": "X", "path": "PATH"}.get(option.type.name, "TEXT")


# -- errors -----------------------------------------------------------------------------------
def errors_page() -> Iterator[str]:
    yield "# What can go wrong\n"
    yield ERRORS
    known = sorted(descendants(errors.FedloomError), key=lambda one: one.exit_code)
    rows = [("0", "", "Done."), ("2", "", "A command, option or argument that does not exist or is missing.")]
    rows += [(str(one.exit_code), code(one.__name__), plain(one.__doc__ or "")) for one in [errors.FedloomError, *known]]
    yield from table(["exit code", "exception", "what"], sorted(rows, key=lambda row: int(row[0])))


def descendants(kind: type[errors.FedloomError]) -> Iterator[type[errors.FedloomError]]:
    for one in kind.__subclasses__():
        if one.__module__ == errors.__name__:
            yield one
            yield from descendants(one)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        path = FOLDER / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"docs/reference/{name} is new")


if __name__ == "__main__":
    main()
