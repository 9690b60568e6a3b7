"""The page of entrances for scripts and plugins, from signatures, docstrings and short classes as they are written."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from markup import code, plain, table

from fedloom import api, config
from fedloom.assemble import simulation as assemble
from fedloom.core import boundary, client_site, messages, method, registry, result, seeds, settings
from fedloom.data.readers import DATASETS
from fedloom.engine.run import Watcher
from fedloom.maths.averaging import AVERAGING
from fedloom.methods.base import METHODS, AveragingMethod, FederatedMethod
from fedloom.models import export, predict
from fedloom.models.personal import load_model
from fedloom.report.terminal.live import LiveView
from fedloom.search.base import SURROGATES
from fedloom.spaces.base import SPACES, SearchSpace
from fedloom.supernets.base import SUPERNETS, Supernet
from fedloom.supernets.foreign import PUBLIC
from fedloom.training.tools import Tools

ENTRANCES: dict[str, list[Any]] = {
    "In a script or notebook": [api.run, api.Result, api.compare, api.Comparison],
    "Run a federation, part by part": [
        config.load,
        config.from_table,
        config.to_toml,
        assemble.new_run,
        assemble.resume_run,
        assemble.reopen_run,
        assemble.free_folder,
        Watcher,
        LiveView,
    ],
    "Read what a run left": [result.RunResult, result.ClientResult, result.LedgerEntry],
    "Use a personal model": [load_model, predict.read_model, predict.predict, export.to_safetensors, export.to_torch, export.to_onnx],
    "Write a method": [
        method.Method,
        method.ServerState,
        method.per_client,
        FederatedMethod,
        AveragingMethod,
        method.Answer,
        boundary.Upload,
        messages.Instruction,
        messages.Report,
        client_site.ClientSite,
        client_site.ClientData,
        client_site.ClientMemory,
        client_site.PersonalModel,
        client_site.Diary,
        Tools,
        settings.setting,
        seeds.rng,
        seeds.derive_seed,
    ],
    "Register your own components": [registry.Registry, config.plug_in],
    "Write a search space": [SearchSpace, Supernet],
}


def python_page() -> Iterator[str]:
    yield "# From Python\n"
    yield "The functions and classes that scripts and plugins need. The [examples](../start/examples.md) use them. The rest may change.\n"
    for title, things in ENTRANCES.items():
        yield f"## {title}\n"
        for thing in things:
            yield from entrance(thing)
    yield "## What is registered\n\nEach name can be used in a setting. [A plugin](../how-to/own-space.md) can add names.\n"
    where = {
        "fedloom.methods.base": {"METHODS": METHODS},
        "fedloom.spaces.base": {"SPACES": SPACES},
        "fedloom.supernets.base": {"SUPERNETS": SUPERNETS},
        "fedloom.data.readers": {"DATASETS": DATASETS},
        "fedloom.search.base": {"SURROGATES": SURROGATES},
        "fedloom.maths.averaging": {"AVERAGING": AVERAGING},
        "fedloom.supernets.foreign": {"PUBLIC": PUBLIC},
    }
    for module, tables in where.items():
        for name, known in tables.items():
            yield f"### {name}\n\n`from {module} import {name}`\n"
            yield from table(["name", "meaning"], ((code(key), plain(entry.meaning)) for key, entry in known.items()))


def entrance(thing: Any) -> Iterator[str]:
    place = "fedloom" if thing.__module__ == api.__name__ else thing.__module__
    yield f"### {thing.__name__}\n\n`from {place} import {thing.__name__}`\n"
    if inspect.isclass(thing):
        rows = list(functions(thing))
        if getattr(thing, "_is_protocol", False) or not rows:
            yield f"```py\n{inspect.getsource(thing)}```\n"
            return
        yield said(thing)
        yield from table(["", "meaning"], [*values(thing), *rows])
    else:
        yield f"```py\n{signature(thing.__name__, thing)}\n```\n"
        yield said(thing)


def said(thing: Any) -> str:
    """What its own docstring says, without examples."""
    return plain((vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__) or "").partition(">>>")[0].rstrip() + "\n"


def values(kind: type) -> Iterator[tuple[str, str]]:
    """Fields of a dataclass, with the comments behind them."""
    for item in fields(kind) if is_dataclass(kind) else ():
        comment = re.search(rf"^    {item.name}: .*?  # (.*)$", inspect.getsource(kind), re.MULTILINE)
        yield code(f"{item.name}: {item.type}"), plain(comment[1]) if comment else ""


def functions(kind: type) -> Iterator[tuple[str, str]]:
    """Public functions and properties of a class, with what their docstrings say."""
    for name, member in vars(kind).items():
        called = inspect.isfunction(member) or isinstance(member, staticmethod | classmethod)
        held = getattr(member, "fget", getattr(member, "func", None))  # by a property, by a cached one
        function = inspect.unwrap(member) if called else held
        if name.startswith("_") or function is None or not inspect.isfunction(function):
            continue
        shown = signature(name, function).removeprefix("def ") if called else f"{name}: {function.__annotations__.get('return', 'Any')}"
        yield code(shown), said(function).strip()


def signature(name: str, function: Callable[..., Any]) -> str:
    """As it is written, without self."""
    whole = inspect.signature(function)
    kept = [parameter for key, parameter in whole.parameters.items() if key not in ("self", "cls")]
    shown = re.sub(r"(: |-> )'([^']*)'", r"\1\2", f"def {name}{whole.replace(parameters=kept)}")  # annotations are kept as text
    return shown.replace("'", '"')
