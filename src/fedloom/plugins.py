"""Components of the user's own: files or modules that register search spaces, methods and the rest as Fedloom's own files do.

They are named in the setting ``plugins`` or with ``--plugin``, and imported before settings are read, because the names in the
registries decide which tables of settings there are. A plugin is ordinary Python that runs with the rights of whoever names it.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module, invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from fedloom import methods, search, spaces, supernets  # noqa: F401 - their names come first: a plugin cannot take them
from fedloom.core.errors import FedloomError, UnusablePlugin, one_line
from fedloom.core.method import Method
from fedloom.core.registry import Entry, Registry
from fedloom.data.readers import DATASETS
from fedloom.maths.averaging import AVERAGING
from fedloom.methods.base import METHODS
from fedloom.search.base import SURROGATES
from fedloom.spaces.base import SPACES
from fedloom.supernets.base import SUPERNETS
from fedloom.supernets.foreign import PUBLIC

# What a plugin may add to, by what one entry is.
TABLES: dict[str, Registry[Any]] = {table.what: table for table in (SPACES, SUPERNETS, METHODS, SURROGATES, DATASETS, AVERAGING, PUBLIC)}
WITH_SETTINGS = ("search space", "method")  # a table of settings has the name of each
ADD = '@SPACES.add("name", Settings, "meaning"), likewise SUPERNETS and METHODS, @SURROGATES.add("name", meaning="…") and the others'
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_folders: set[str] = set()  # of plugins that are files


def full_name(name: str, folder: Path = Path()) -> str:
    """A file by its whole path, so that any directory finds it; a module as it is. folder: what a short path starts from."""
    return os.path.abspath(folder / name) if name.endswith(".py") else name


def load(names: Sequence[str], reserved: Collection[str] = ()) -> tuple[str, ...]:
    """Import plugins, each once, and return their full names. reserved: names that no table of settings may have."""
    found = tuple(map(full_name, names))
    for name in found:
        undo = remember()
        try:
            _load(name, reserved)
        except UnusablePlugin:
            undo()
            raise
    return found


def imported(names: Sequence[str]) -> tuple[str, ...]:
    """The full names of plugins that a run folder names, if all are imported already: who looks at a run runs no code of it."""
    found = tuple(map(full_name, names))
    if missing := [name for name in found if not _is_imported(name)]:
        why = "Looking at a run imports no code that its folder names. If you trust that code, add --trust-plugins"
        raise UnusablePlugin(f"The run needs the plugin {', '.join(missing)}. {why}", plugin=missing[0])
    return found


def _is_imported(name: str) -> bool:
    if not name.endswith(".py"):
        return name in sys.modules
    file = getattr(sys.modules.get(Path(name).stem), "__file__", None)
    return file is not None and os.path.realpath(file) == os.path.realpath(name)


def remember() -> Callable[[], None]:
    """A function that takes back what has been registered and imported from plugin files since."""
    tables, modules, path = {what: dict(table) for what, table in TABLES.items()}, set(sys.modules), list(sys.path)

    def undo() -> None:
        for what, table in TABLES.items():
            table.clear()
            table.update(tables[what])
        for name in set(sys.modules) - modules:
            if str(Path(getattr(sys.modules[name], "__file__", None) or "").parent) in _folders:
                del sys.modules[name]
        sys.path[:] = path

    return undo


def _load(name: str, reserved: Collection[str]) -> None:
    before = {what: dict(table) for what, table in TABLES.items()}
    module = _module_name(name)
    if module in sys.modules:
        return
    try:
        import_module(module)
    except (Exception, SystemExit) as error:  # a user's code can raise anything
        said = str(error) if isinstance(error, FedloomError) else f"{type(error).__name__}: {one_line(error)}"
        raise UnusablePlugin(f"{_place(error, name)}: {said}. --trace shows how it came there", plugin=name) from error
    for what, table in TABLES.items():
        if replaced := [key for key, value in before[what].items() if table.get(key) is not value]:
            raise UnusablePlugin(f"{name} replaces the {what} {replaced[0]!r}. Choose another name", plugin=name)
    new = [(what, key, value) for what, table in TABLES.items() for key, value in table.items() if key not in before[what]]
    if not new:
        raise UnusablePlugin(f"{name} registers nothing: a plugin adds to a table of components, {ADD}", plugin=name)
    for what, key, entry in new:
        if not isinstance(entry, Entry):
            raise UnusablePlugin(f"{name} puts the {what} {key!r} into its table itself. Register it: {ADD}", plugin=name)
        if what in WITH_SETTINGS:
            for problem in _problems(what, key, entry, reserved):
                raise UnusablePlugin(f"{name}: {problem}", plugin=name)


def _module_name(plugin: str) -> str:
    """What Python imports a plugin by; its file is then certain to be the one that is found."""
    path = Path(plugin)
    if not plugin.endswith(".py"):
        try:
            spec = find_spec(plugin)
        except (ImportError, ValueError):  # of a package above it, which is missing or cannot be imported; an impossible name
            spec = None
        if spec is None:
            cure = f"Install it, or name a file with its ending: {plugin}.py"
            raise UnusablePlugin(f"Python finds no module {plugin!r} for a plugin. {cure}", plugin=plugin)
        return plugin
    if not path.is_file():
        raise UnusablePlugin(f"There is no plugin file {plugin}. Put it there, or name it by its present path", plugin=plugin)
    if not path.stem.isidentifier():
        raise UnusablePlugin(f"{plugin} cannot be imported: name the file like a Python variable, such as my_space.py", plugin=plugin)
    folder = str(path.parent)
    _folders.add(folder)
    if folder not in sys.path:
        sys.path.append(folder)  # last: its files hide no module; they find each other by it
    invalidate_caches()
    other = getattr(sys.modules.get(path.stem), "__file__", None) or getattr(find_spec(path.stem), "origin", None)
    if other is None or not Path(other).exists() or not path.samefile(other):
        raise UnusablePlugin(f"{plugin} has the name of another module ({other}). Rename the file", plugin=plugin)
    return path.stem


def _place(error: BaseException, plugin: str) -> str:
    """File and line in the user's own code, as far as that is known."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == plugin or str(Path(frame.filename).parent) in _folders]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else plugin


def _problems(what: str, name: str, entry: Entry[Any], reserved: Collection[str]) -> Iterator[str]:
    """Why a component cannot have its table of settings."""
    others = [other for other in WITH_SETTINGS if other != what and name in TABLES[other]]
    if not NAME.fullmatch(name):
        yield f"the {what} {name!r} needs a name of letters, digits and underscores that begins with a letter"
    if name in reserved or others:
        yield f"the {what} cannot be named {name!r}, because settings of that name are something else. Choose another name"
    if getattr(entry.make, "name", name) != name:
        yield f"the {what} {name!r} says name = {entry.make.name!r}. Write the same name in both places"
    if what == "method" and not (isinstance(entry.make, type) and issubclass(entry.make, Method)):
        yield f"the method {name!r} must be a class that inherits fedloom.core.method.Method"
    if not (isinstance(entry.settings, type) and is_dataclass(entry.settings)):
        yield f"the settings of {name} must be a frozen dataclass; it may be empty"
        return
    yield from _unusable_fields(entry.settings)


def _unusable_fields(kind: type) -> Iterator[str]:
    """Why a dataclass cannot be a table of settings, which a file keeps and gives back."""
    try:
        hints = get_type_hints(kind)
    except Exception as error:  # a user's annotations can say anything
        yield f"the types in {kind.__name__} cannot be read ({type(error).__name__}: {one_line(error)})"
        return
    for item in fields(kind):
        where, hint = f"{item.name} of {kind.__name__}", hints[item.name]
        if is_dataclass(hint) and isinstance(hint, type):  # a table in this table
            if item.default is MISSING and item.default_factory is MISSING:
                yield f"{where} must have a default: write field(default_factory={hint.__name__})"
            yield from _unusable_fields(hint)
        elif "meaning" not in item.metadata:
            yield f'{where} must be made with setting(default, "meaning")'
        elif not _is_written(hint):
            yield f"{where} cannot be written to a file: use int, float, str, bool, tuple[…, ...] of these or a dataclass of settings"


def _is_written(hint: Any) -> bool:
    """Whether a file of settings can hold values of this type."""
    if get_origin(hint) is tuple:
        parts = set(get_args(hint)) - {Ellipsis}
        return len(parts) == 1 and _is_written(parts.pop())
    return hint in (int, float, str, bool)
