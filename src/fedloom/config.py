"""Settings: TOML files and ``key=value`` overrides become frozen dataclasses, or a sentence that says what is wrong.

One rule: a name picks a component, and a table of that name holds its settings.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from fedloom import plugins
from fedloom.core.errors import InvalidConfig, one_line, printable
from fedloom.core.hardware import Hardware, HardwareSettings, assigned, tiers
from fedloom.core.privacy import PrivacySettings
from fedloom.core.registry import did_you_mean
from fedloom.core.settings import setting
from fedloom.data.readers import DataSettings
from fedloom.data.splits import SplitSettings
from fedloom.engine.base import ENGINES
from fedloom.files import read_plain
from fedloom.methods.base import METHODS
from fedloom.spaces.base import SPACES
from fedloom.spaces.budget import BudgetSettings, check_tiers, tier_count
from fedloom.training.recipe import TrainingSettings
from fedloom.training.server import AveragingSettings

LONGEST = 1_000_000  # characters of a settings file
DEEPEST = 32  # parts of a key, as in training.rate: tomllib takes time that grows with the square of them
KEY_PART = r"""(?:[A-Za-z0-9_-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+"""
TOO_DEEP = re.compile(rf"(?<![A-Za-z0-9_\\-])(?:{KEY_PART}\.[ \t]*+){{{DEEPEST}}}")
LARGEST = 2**63 - 1  # whole number


@dataclass(frozen=True)
class RunSettings:
    folder: str = setting("", "folder of the run; empty: runs/<preset>, with a number added if that exists")
    checkpoint_every: int = setting(1, "rounds between saved states", low=1)
    track: bool = setting(False, "write scalars by round for run.tracker")
    tracker: str = setting(
        "tensorboard",
        "where run.track writes: tensorboard (into tensorboard/ of the run folder; extra track), wandb or mlflow (their own packages)",
        choices=("tensorboard", "wandb", "mlflow"),
    )


@dataclass(frozen=True)
class Settings:
    method: str = setting("perfedsde", "federated method; its settings are in the table with its name")
    space: str = setting("mobilenetv3", "search space; its settings are in the table with its name")
    engine: str = setting("inline", "how clients are run; its settings are in the table with its name")
    plugins: tuple[str, ...] = setting((), "files (.py) or modules with your own components; they are imported, so they can do anything")
    seed: int = setting(0, "seed of every random draw", low=0)
    clients: int = setting(8, "members of the federation", low=1)
    participants: int = setting(4, "clients drawn per round", low=1)
    rounds: int = setting(10, "rounds of the federation", low=1)
    protocol: str = setting("clean", "what selects models: validation data, or test data as in the papers", choices=("clean", "paper"))
    weights: str = setting(
        "",
        "weights to start from: a file written by import-weights, a run, or a federation's newcomers.safetensors; empty: random weights",
        path=True,
    )
    data: DataSettings = field(default_factory=DataSettings)
    split: SplitSettings = field(default_factory=SplitSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    averaging: AveragingSettings = field(default_factory=AveragingSettings)
    budget: BudgetSettings = field(default_factory=BudgetSettings)
    hardware: HardwareSettings = field(default_factory=HardwareSettings)
    privacy: PrivacySettings = field(default_factory=PrivacySettings)
    run: RunSettings = field(default_factory=RunSettings)
    components: Mapping[str, Any] = field(default_factory=dict)  # component name -> its settings, for all known components


def map_paths(settings: Any, change: Callable[[str], Any]) -> Any:
    """The settings, with all in them that is marked as a path changed, empty ones too."""
    changed: dict[str, Any] = {}
    for item in fields(settings):
        value = getattr(settings, item.name)
        if is_dataclass(value):
            changed[item.name] = map_paths(value, change)
        elif isinstance(value, Mapping):
            changed[item.name] = {name: map_paths(own, change) for name, own in value.items()}
        elif item.metadata.get("path"):
            changed[item.name] = tuple(map(change, value)) if isinstance(value, tuple) else change(value)
    return replace(settings, **changed)


def component_types() -> dict[str, type]:
    """Every component that has a table of settings."""
    return {name: entry.settings for registry in (METHODS, SPACES, ENGINES) for name, entry in registry.items()}


def plug_in(names: Sequence[str]) -> tuple[str, ...]:
    """Import the user's own components before settings are read; returns their full names."""
    return plugins.load(names, reserved=[*(item.name for item in fields(Settings)), *ENGINES])


# -- reading ------------------------------------------------------------------
def load(source: str | None, overrides: Sequence[str] = ()) -> Settings:
    """Settings from a preset's name or a TOML file, with overrides on top."""
    return from_table(table_of(overrides, read_tables(source, table_of(overrides)) if source else {}))


def read_tables(source: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a preset or file for the method that runs. said: what will be laid over them.

    A table ``[when.METHOD]`` holds what the source says for that method alone: it is laid over the rest when the method runs.
    """
    table = _read_source(source)
    special = table.pop("when", {})
    if not isinstance(special, dict) or not all(isinstance(own, dict) for own in special.values()):
        raise InvalidConfig(f"{source}: when must hold tables by the names of methods, such as [when.spider]", key="when")
    if special and (named := said.get("plugins", table.get("plugins"))):
        plug_in(fill(Settings, {"plugins": named}).plugins)  # they may bring the methods that are named here
    for name in special:
        if name not in METHODS:
            raise InvalidConfig(f"{source}: [when.{name}] names no method. {did_you_mean(name, list(METHODS))}", key=f"when.{name}")
    method = said.get("method", table.get("method", Settings.method))
    return _laid_over(table, special.get(method, {}) if isinstance(method, str) else {})


def table_of(overrides: Sequence[str], table: dict[str, Any] | None = None) -> dict[str, Any]:
    """``key=value`` overrides as a table, laid over another one."""
    table = table or {}
    for override in overrides:
        _apply_override(table, override)
    return table


def from_table(table: Mapping[str, Any], trust_plugins: bool = True) -> Settings:
    """Checked settings from a nested table, as TOML gives it. trust_plugins: import those that it names; else they must be imported."""
    if "plugins" in table:  # first: they bring tables of their own
        named = fill(Settings, {"plugins": table["plugins"]}).plugins
        table = {**table, "plugins": plug_in(named) if trust_plugins else plugins.imported(named)}
    components = component_types()
    own = {name: value for name, value in table.items() if name not in components}
    known = [item.name for item in fields(Settings) if item.name != "components"]
    for key in own:
        if key not in known:
            raise InvalidConfig(f"Unknown key {key!r}. {did_you_mean(key, [*known, *components])}", key=key)
    settings = fill(Settings, own, "")
    made = {name: fill(kind, table.get(name, {}), name) for name, kind in components.items()}
    settings = replace(settings, components=made)
    _check_names(settings)
    return settings


def from_run(table: Mapping[str, Any], trust_plugins: bool) -> Settings:
    """The settings that a run folder keeps. Before there were a surrogate and a generator, ``perfedsde.archive`` was the archive's size."""
    known = table.get("perfedsde", {})
    if isinstance(known, Mapping) and type(known.get("archive")) is int:
        table = {**table, "perfedsde": {"surrogate": "none", **known, "archive": True, "archive_size": known["archive"]}}
    return from_table(table, trust_plugins)


def without_components(table: Mapping[str, Any]) -> Settings:
    """What a run folder says that needs no plugin: all settings but those of components, whose names are not checked."""
    known = {item.name for item in fields(Settings)} - {"components"}
    settings: Settings = fill(Settings, {name: value for name, value in table.items() if name in known})
    return settings


def _check_names(settings: Settings) -> None:
    SPACES[settings.space]  # refuses an unknown name
    method = METHODS[settings.method].make
    if method.spaces and settings.space not in method.spaces:
        raise InvalidConfig(f"{settings.method} is not defined on {settings.space}. Set space={method.spaces[0]}", key="space")
    ENGINES[settings.engine]
    if settings.participants > settings.clients:
        what = f"participants is {settings.participants}, but the federation has only {settings.clients} clients"
        raise InvalidConfig(f"{what}. Set participants={settings.clients} or fewer, or more clients", key="participants")
    if settings.training.rejoin and settings.protocol == "paper":
        what = "training.rejoin trains on the images that selected, and under protocol=paper these are the test images"
        raise InvalidConfig(f"{what}. Set protocol=clean, or training.rejoin=false", key="training.rejoin")
    several = len(tiers(settings.hardware, tier_count(settings.budget)))
    check_tiers(settings.budget, several, settings.clients)
    method.check_tiers(settings.components[settings.method], several)


def tier_of_each(settings: Settings, clients: Sequence[str]) -> dict[str, Hardware]:
    """What each client computes with, and which tier that is. There are as many tiers as hardware.* or budget.* have numbers."""
    return assigned(settings.hardware, clients, settings.seed, tier_count(settings.budget), settings.budget.tiers)


def presets() -> dict[str, str]:
    """Name -> first comment line of every preset."""
    folder = resources.files("fedloom") / "presets"
    found = {Path(str(file)).stem: file.read_text() for file in folder.iterdir() if str(file).endswith(".toml")}
    return {name: text.partition("\n")[0].lstrip("# ") for name, text in sorted(found.items())}


def _read_source(source: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """A preset or file as a table, laid over its ``base`` if it names one: another preset, or a file beside it.

    above: the sources that are being laid over this one.
    """
    if Path(source).resolve() in [Path(name).resolve() for name in above]:
        raise InvalidConfig(f"{' -> '.join([*above, source])}: base leads back to {source}. One of them must do without", source=source)
    if source in presets():
        table, folder = tomllib.loads((resources.files("fedloom") / "presets" / f"{source}.toml").read_text()), Path()
    elif source.endswith(".toml"):
        table, folder = read_toml(Path(source)), Path(source).parent
        table |= _found_from(folder, table)
    else:
        named = f"{above[-1]}: base is {source!r}. " if above else ""
        hint = did_you_mean(source, list(presets()))
        raise InvalidConfig(f"{named}There is no preset named {source!r}, and a settings file ends in .toml. {hint}", source=source)
    base = table.pop("base", None)
    if base is None:
        return table
    if not isinstance(base, str):
        raise InvalidConfig(f"{source}: base must be the name of a preset or a .toml file, got {_shown(base)}", key="base")
    below = base if base in presets() or not base.endswith(".toml") else str(folder / base)
    return _laid_over(_read_source(below, (*above, source)), table)


def _found_from(folder: Path, table: Mapping[str, Any]) -> dict[str, Any]:
    """Plugins that a settings file names lie beside it; what is no list of texts is refused later."""
    names = table.get("plugins")
    if not isinstance(names, list):
        return {}
    return {"plugins": [plugins.full_name(name, folder) if isinstance(name, str) else name for name in names]}


def _laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """The settings of both, those above winning; tables are merged."""
    tables = [name for name in above if isinstance(above[name], dict) and isinstance(below.get(name), dict)]
    return {**below, **above, **{name: _laid_over(below[name], above[name]) for name in tables}}


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return _parsed(read_plain(path).decode())
    except FileNotFoundError:
        hint = f". Did you mean the preset {path.stem!r}? It has no ending" if str(path) == path.name and path.stem in presets() else ""
        raise InvalidConfig(f"There is no file {path}{hint}", path=str(path)) from None
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"{path} is not a readable TOML file: {one_line(error)}", path=str(path)) from error


def _parsed(text: str) -> dict[str, Any]:
    """TOML as a table; ValueError for what is none, and for what would keep its parser busy or exhaust it."""
    if len(text) > LONGEST:
        raise ValueError(f"it has {len(text):,} characters, and settings have at most {LONGEST:,}")
    if TOO_DEEP.search(text):
        raise ValueError(f"it has a key of more than {DEEPEST} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def _apply_override(table: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not (key and equals):
        raise InvalidConfig(f"{_shown(override)} is not an override: write key=value, for example training.rate=0.1")
    *tables, leaf = key.split(".", DEEPEST)
    if "." in leaf:
        raise InvalidConfig(f"{_shown(key)} is no key: it has more than {DEEPEST} parts", key=key)
    for name in tables:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise InvalidConfig(f"{printable(key, 80)}: {printable(name, 80)} is a single setting, not a table", key=key)
    try:
        parsed = _parsed(f"value = {text}")
    except ValueError:  # TOMLDecodeError, or more digits than Python reads
        parsed = {"value": text}  # a bare word is text
    if len(parsed) > 1:
        raise InvalidConfig(f"{_shown(override)} sets more than one key: write one key=value per argument", key=key)
    table[leaf] = parsed["value"]


def fill(kind: type, table: Any, where: str = "") -> Any:
    """A settings dataclass from a table, every value checked."""
    if not isinstance(table, Mapping):
        raise InvalidConfig(f"{where} is a table of settings, not a value; write {where}.KEY=VALUE", key=where)
    hints = get_type_hints(kind)
    known = {item.name: item for item in fields(kind)}
    values = {}
    for key, value in table.items():
        full = f"{where}.{key}" if where else key
        if key not in known:
            raise InvalidConfig(f"Unknown key {_shown(full)}. {did_you_mean(key, list(known))}", key=full)
        if is_dataclass(hints[key]):
            values[key] = fill(hints[key], value, full)
        else:
            values[key] = _checked(full, value, hints[key], known[key].metadata)
    return kind(**values)


def _checked(key: str, value: Any, hint: Any, limits: Mapping[str, Any]) -> Any:
    if get_origin(hint) is UnionType:  # one for all, or a list with one for each
        alone, several = get_args(hint)
        return _checked(key, value, several if isinstance(value, list | tuple) else alone, limits)
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise InvalidConfig(f"{key} must be a list such as {_list_like(value, get_args(hint)[0])}, got {_shown(value)}", key=key)
        return tuple(_checked(f"{key}[{index}]", part, get_args(hint)[0], limits) for index, part in enumerate(value))
    if hint is float and type(value) is int:
        value = float(value) if abs(value) <= sys.float_info.max else math.inf
    if type(value) is not hint:
        names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
        raise InvalidConfig(f"{key} must be {names[hint]}, got {_shown(value)}", key=key)
    if isinstance(value, int) and abs(value) > LARGEST:
        raise InvalidConfig(f"{key} must be at most {LARGEST:,}", key=key)
    if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):  # halves of characters
        raise InvalidConfig(f"{key} is not readable text: {_shown(value)}", key=key)
    choices, low, high = limits["choices"], limits["low"], limits["high"]
    if choices and value not in choices:
        raise InvalidConfig(f"{key} must be one of {', '.join(choices)}; got {_shown(value)}", key=key)
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidConfig(f"{key} must be a finite number, got {value!r}", key=key)
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = [f"at least {low:g}"] if low is not None else []
        bounds += [f"at most {high:g}"] if high is not None else []
        raise InvalidConfig(f"{key} must be {' and '.join(bounds)}, got {value!r}", key=key)
    return value


def _list_like(value: Any, kind: type) -> str:
    """What was meant, as a shell passes it on: quotes around the list, and around text in it."""
    if kind is not str:
        return "[1, 2]"
    words = [word.strip(" \"'") for word in str(value).strip("[]").split(",")] if isinstance(value, str) else []
    return f"'{json.dumps([printable(word, 60) for word in words if word] or ['one', 'two'], ensure_ascii=False)}'"


def _shown(value: Any) -> str:
    """A value of anybody's in a sentence."""
    try:
        return printable(repr(value), 200)
    except (ValueError, RecursionError):  # of numbers with thousands of digits, of tables in tables
        return "something too large to be shown"


def space_settings(space: str, overrides: Sequence[str], base: Any = None) -> Any:
    """Settings of a space: ``base``, or else the defaults, as overrides change them; those can be of this space only."""
    SPACES[space]  # refuses an unknown name
    for override in overrides:
        if not override.startswith(f"{space}."):
            raise InvalidConfig(f"{override!r} is not a setting of {space}: write {space}.KEY=VALUE")
    given = as_overrides(space, asdict(base)) if base else []
    return load(None, [f"space={space}", *given, *overrides]).components[space]


def as_overrides(space: str, settings: Mapping[str, Any]) -> list[str]:
    """Settings of a space as a user writes them: JSON's values are TOML's, and a bare word is text."""
    given = []
    for key, value in settings.items():
        if isinstance(value, Mapping):  # a table in the table
            given += as_overrides(f"{space}.{key}", value)
        else:
            given.append(f"{space}.{key}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}")
    return given


# -- writing and explaining --------------------------------------------------------
def to_toml(settings: Settings) -> str:
    """The resolved settings as a TOML file that ``load`` reads back to the same settings."""
    top, tables = [], []
    for item in fields(Settings):
        value = getattr(settings, item.name)
        if item.name == "components":
            tables += [(name, value[name]) for name in sorted(value)]
        elif is_dataclass(value):
            tables.append((item.name, value))
        else:
            top.append(f"{item.name} = {_toml(value)}")
    for name, table in tables:
        top += _toml_table(name, table)
    return "\n".join(top) + "\n"


def _toml_table(name: str, table: Any) -> list[str]:
    """The lines of a table, and of the tables in it after its own values."""
    values = {item.name: getattr(table, item.name) for item in fields(table)}
    inner = {key: value for key, value in values.items() if is_dataclass(value)}
    lines = ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in values.items() if key not in inner)]
    return lines + [line for key, value in inner.items() for line in _toml_table(f"{name}.{key}", value)]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's escapes are TOML's, but for this one
    return repr(value)


def explain() -> Iterator[tuple[str, str, str]]:
    """(key, default, meaning) of every setting there is."""
    yield from explain_table(Settings, "")
    for name, kind in sorted(component_types().items()):
        yield from explain_table(kind, f"{name}.")


def explain_table(kind: type, prefix: str) -> Iterator[tuple[str, str, str]]:
    hints = get_type_hints(kind)
    for item in fields(kind):
        if is_dataclass(hints[item.name]):
            yield from explain_table(hints[item.name], f"{prefix}{item.name}.")
        elif "meaning" in item.metadata:
            choices = item.metadata["choices"]
            meaning = item.metadata["meaning"] + (f" ({' | '.join(choices)})" if choices else "")
            yield f"{prefix}{item.name}", _toml(item.default), meaning
