"""Settings: what is accepted, what is refused and in which words, and the way to a file and back."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from fedloom import config
from fedloom.config import Settings, component_types, explain, from_run, from_table, load, presets, read_toml, to_toml
from fedloom.core.errors import InvalidConfig
from support.checks import Fedloom, check_refused


def refused(*overrides: str, source: str | None = None) -> InvalidConfig:
    with pytest.raises(InvalidConfig) as caught:
        load(source, overrides)
    return caught.value


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


# -- what is accepted -------------------------------------------------------------


def test_defaults() -> None:
    settings = load(None)
    assert (settings.method, settings.space, settings.engine, settings.protocol) == ("perfedsde", "mobilenetv3", "inline", "clean")
    assert (settings.seed, settings.clients, settings.participants, settings.rounds) == (0, 8, 4, 10)
    assert (settings.data.name, settings.split.alpha, settings.training.batch, settings.run.checkpoint_every) == ("digits", 0.3, 50, 1)
    assert set(settings.components) == {"perfedsde", "fedavg", "local", "mobilenetv3", "inline"} | set(component_types())
    assert settings.components["perfedsde"].offspring == 10 and settings.components["inline"].device == "auto"


def test_a_file_changes_only_what_it_says(tmp_path: Path) -> None:
    source = write(tmp_path / "mine.toml", 'method = "fedavg"\n[training]\nrate = 0.2\n[local]\nepochs = 7\n')
    settings, plain = load(source), load(None)
    assert settings.method == "fedavg" and settings.training.rate == 0.2 and settings.components["local"].epochs == 7
    assert replace(settings.training, rate=plain.training.rate) == plain.training
    assert settings.components["perfedsde"] == plain.components["perfedsde"]


def test_overrides_win_over_the_file_and_the_last_one_over_all(tmp_path: Path) -> None:
    source = write(tmp_path / "mine.toml", "rounds = 3\nclients = 9\n")
    settings = load(source, ["rounds=4", "rounds=5"])
    assert (settings.rounds, settings.clients) == (5, 9)


@pytest.mark.parametrize(
    ("override", "get", "value"),
    [
        ("rounds=3", lambda s: s.rounds, 3),
        ("training.rate=0.5", lambda s: s.training.rate, 0.5),
        ("training.rate=1e-3", lambda s: s.training.rate, 0.001),
        ("training.rate=1", lambda s: s.training.rate, 1.0),  # a whole number is a number
        ("training.flip=false", lambda s: s.training.flip, False),
        ("training.finetune_rates=[0.1, 2]", lambda s: s.training.finetune_rates, (0.1, 2.0)),
        ("training.finetune_rates=[]", lambda s: s.training.finetune_rates, ()),
        ("mobilenetv3.strides=[1,1,2,2,2]", lambda s: s.components["mobilenetv3"].strides, (1, 1, 2, 2, 2)),
        ("method=fedavg", lambda s: s.method, "fedavg"),  # a bare word is text
        ('method="fedavg"', lambda s: s.method, "fedavg"),
        ("run.folder=/somewhere/else=1", lambda s: s.run.folder, "/somewhere/else=1"),  # only the first = divides
        ("run.folder=", lambda s: s.run.folder, ""),
        ("local.architecture=smallest", lambda s: s.components["local"].architecture, "smallest"),
        ("perfedsde.mutation=1", lambda s: s.components["perfedsde"].mutation, 1.0),  # both bounds are allowed values
        ("perfedsde.mutation=0", lambda s: s.components["perfedsde"].mutation, 0.0),
    ],
)
def test_an_override(override: str, get: Callable[[Settings], Any], value: object) -> None:
    got = get(load(None, [override]))
    assert got == value and type(got) is type(value)


def test_settings_of_components_that_are_not_used_are_kept() -> None:
    assert load(None, ["method=local", "perfedsde.population=5"]).components["perfedsde"].population == 5


# -- what is refused -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("round=3", ("Unknown key 'round'", "Did you mean 'rounds'?", "participants")),
        ("training.rates=3", ("Unknown key 'training.rates'", "Did you mean 'rate'?")),
        ("perfedsde.offsprings=3", ("Unknown key 'perfedsde.offsprings'", "Did you mean 'offspring'?")),
        ("fedavgg.architecture=medium", ("Unknown key 'fedavgg'", "Did you mean 'fedavg'?")),
        ("components=3", ("Unknown key 'components'",)),
        ("rounds=3.5", ("rounds must be a whole number, got 3.5",)),
        ("rounds=three", ("rounds must be a whole number, got 'three'",)),
        ("rounds=true", ("rounds must be a whole number, got True",)),
        ("training.rate=fast", ("training.rate must be a number, got 'fast'",)),
        ("training.rate=true", ("training.rate must be a number, got True",)),
        ("training.flip=1", ("training.flip must be true or false, got 1",)),
        ("method=3", ("method must be text, got 3",)),
        ("training.finetune_rates=0.1", ("training.finetune_rates must be a list such as [1, 2], got 0.1",)),
        ("training.finetune_rates=[0.1, 'x']", ("training.finetune_rates[1] must be a number, got 'x'",)),
        ("perfedsde.mutation=1.5", ("perfedsde.mutation must be at least 0 and at most 1, got 1.5",)),
        ("perfedsde.mutation=-0.1", ("perfedsde.mutation must be at least 0 and at most 1, got -0.1",)),
        ("rounds=0", ("rounds must be at least 1, got 0",)),
        ("inline.threads=1025", ("inline.threads must be at least 0 and at most 1024, got 1025",)),
        ("processes.threads=1025", ("processes.threads must be at least 1 and at most 1024, got 1025",)),
        ("ray.threads=1025", ("ray.threads must be at least 1 and at most 1024, got 1025",)),
        ("seed=-1", ("seed must be at least 0, got -1",)),
        ("training.batch=1", ("training.batch must be at least 2, got 1",)),  # batch normalisation needs two
        ("training.momentum=nan", ("training.momentum must be a finite number, got nan",)),
        ("training.momentum=inf", ("training.momentum must be a finite number, got inf",)),
        ("training.rate=inf", ("training.rate must be a finite number, got inf",)),  # where there is no upper limit
        ("split.alpha=nan", ("split.alpha must be a finite number, got nan",)),
        ("training.finetune_rates=[0.1, nan]", ("training.finetune_rates[1] must be a finite number, got nan",)),
        ("training.finetune_rates=[inf]", ("training.finetune_rates[0] must be a finite number, got inf",)),
        ("training.finetune_rates=[0.1, 0, -1]", ("training.finetune_rates[2] must be at least 0, got -1.0",)),
        ("training.finetune_rates=[true]", ("training.finetune_rates[0] must be a number, got True",)),
        pytest.param("training.rate=1" + "0" * 400, ("training.rate must be",), id="beyond floats"),
        pytest.param("seed=1" + "0" * 5000, ("seed must be",), id="more digits than Python reads"),
        ("protocol=dirty", ("protocol must be one of clean, paper; got 'dirty'",)),
        ("data.name=cifar", ("data.name must be one of digits, cifar10", "got 'cifar'")),
        ("method=fedavgg", ("There is no method named 'fedavgg'", "Did you mean 'fedavg'?", "perfedsde")),
        ("space=mobilenet", ("There is no search space named 'mobilenet'", "Did you mean 'mobilenetv3'?")),
        ("engine=online", ("There is no engine named 'online'", "Did you mean 'inline'?")),
        ("participants=9", ("participants is 9", "only 8 clients", "Set participants=8 or fewer")),
        ("rounds", ("'rounds' is not an override", "key=value")),
        ("=3", ("'=3' is not an override", "key=value")),
        ("rounds=3\nclients=5", ("'rounds=3\\nclients=5' sets more than one key", "one key=value per argument")),
        ("rounds=3\n[training]\nrate=1", ("sets more than one key",)),
        ("run.folder=a\udcffb", ("run.folder is not readable text: 'a\\udcffb'",)),  # how Python reads bytes that are no UTF-8
        ("method=\ud800", ("method is not readable text: '\\ud800'",)),
        ("training=3", ("training is a table of settings, not a value", "training.KEY=VALUE")),
        ("perfedsde=3", ("perfedsde is a table of settings, not a value", "perfedsde.KEY=VALUE")),
        ("method.name=fedavg", ("method", "{'name': 'fedavg'}")),
    ],
)
def test_a_refused_override(override: str, words: tuple[str, ...]) -> None:
    message = str(refused(override))
    for word in words:
        assert word in message
    assert "\n" not in message


def test_the_key_is_kept_as_a_fact() -> None:
    assert refused("training.rate=fast").facts == {"key": "training.rate"}
    assert refused("round=3").facts == {"key": "round"}


def test_an_override_below_a_single_setting_of_the_file(tmp_path: Path) -> None:
    source = write(tmp_path / "mine.toml", "rounds = 3\n")
    assert "rounds is a single setting, not a table" in str(refused("rounds.more=3", source=source))


def test_what_is_tested_is_never_trained_on() -> None:
    """Under protocol=paper test images select, so what selected cannot be trained on as well."""
    with pytest.raises(InvalidConfig, match=r"training.rejoin .* these are the test images. Set protocol=clean, or training.rejoin=false"):
        load(None, ["training.rejoin=true", "protocol=paper"])
    assert load(None, ["training.rejoin=true"]).training.rejoin


def test_participants_may_be_all_clients() -> None:
    assert load(None, ["participants=8"]).participants == 8


@pytest.mark.parametrize("text", [b"rounds = \n", b"rounds = 3\nrounds = 4\n", b"method = \xff\n", b"seed = 1" + b"0" * 5000])
def test_an_unreadable_file_is_named(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(text)
    error = refused(source=str(path))
    assert str(error).startswith(f"{path} is not a readable TOML file: ") and error.facts == {"path": str(path)}


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    assert f"There is no file {tmp_path / 'no.toml'}" in str(refused(source=str(tmp_path / "no.toml")))
    assert "Did you mean the preset 'quickstart'? It has no ending" in str(refused(source="quickstart.toml"))
    (tmp_path / "folder.toml").mkdir()
    assert str(tmp_path / "folder.toml") in str(refused(source=str(tmp_path / "folder.toml")))


def test_a_name_that_is_no_preset() -> None:
    message = str(refused(source="quickstrt"))
    assert "There is no preset named 'quickstrt'" in message and "Did you mean 'quickstart'?" in message and ".toml" in message


# -- settings laid over others ---------------------------------------------------------


def test_a_base_gives_what_a_file_does_not_say(tmp_path: Path) -> None:
    write(tmp_path / "low.toml", "rounds = 3\nclients = 9\n[training]\nrate = 0.2\nbatch = 7\n[perfedsde]\noffspring = 3\n")
    source = write(tmp_path / "high.toml", 'base = "low.toml"\nrounds = 4\n[training]\nrate = 0.3\n[local]\nepochs = 2\n')
    settings = load(source, ["training.batch=8"])
    assert (settings.rounds, settings.clients, settings.training.rate, settings.training.batch) == (4, 9, 0.3, 8)
    assert (settings.components["perfedsde"].offspring, settings.components["local"].epochs) == (3, 2)
    assert round_trip(settings) == settings and "base" not in tomllib.loads(to_toml(settings))


def test_a_base_may_be_a_preset_and_have_a_base_itself(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "low.toml", 'base = "quickstart"\nrounds = 5\n')
    settings, preset = load(write(tmp_path / "high.toml", 'base = "folder/low.toml"\nseed = 6\n')), load("quickstart")
    assert settings == replace(preset, rounds=5, seed=6)


def test_a_file_that_says_nothing_is_its_base(tmp_path: Path) -> None:
    assert load(write(tmp_path / "mine.toml", 'base = "cifar10-control"\n')) == load("cifar10-control")


@pytest.mark.parametrize(("high", "low"), [("high.toml", "low.toml"), ("../{0}/high.toml", "../{0}/low.toml"), ("./high.toml", "low.toml")])
def test_a_base_that_leads_back(tmp_path: Path, high: str, low: str) -> None:
    source = write(tmp_path / "high.toml", f'base = "{low.format(tmp_path.name)}"\n')
    write(tmp_path / "low.toml", f'base = "{high.format(tmp_path.name)}"\n')
    message = str(refused(source=source))
    assert "base leads back to" in message and "high.toml" in message and "low.toml" in message


def test_a_file_that_is_its_own_base(tmp_path: Path) -> None:
    assert "base leads back to" in str(refused(source=write(tmp_path / "mine.toml", 'base = "mine.toml"\n')))


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ('"quickstrt"', ("mine.toml: base is 'quickstrt'", "There is no preset named", "Did you mean 'quickstart'?")),
        ('"no.toml"', ("There is no file", "no.toml")),
        ("3", ("mine.toml: base must be the name of a preset or a .toml file, got 3",)),
        ('["quickstart"]', ("base must be the name of a preset or a .toml file",)),
    ],
)
def test_a_base_that_cannot_be(tmp_path: Path, base: str, words: tuple[str, ...]) -> None:
    message = str(refused(source=write(tmp_path / "mine.toml", f"base = {base}\n")))
    assert all(word in message for word in words), message


def test_a_base_belongs_in_a_file() -> None:
    assert "Unknown key 'base'" in str(refused("base=quickstart"))


def test_a_value_and_a_table_do_not_mix(tmp_path: Path) -> None:
    write(tmp_path / "low.toml", "[training]\nrate = 0.2\n")
    assert "training is a table" in str(refused(source=write(tmp_path / "high.toml", 'base = "low.toml"\ntraining = 3\n')))


# -- settings of older run folders ----------------------------------------------------------


def test_a_run_folder_of_before_the_generator_keeps_its_meaning() -> None:
    old = from_run({"perfedsde": {"generator": "evolution", "archive": 7, "offspring": 3}}, True).components["perfedsde"]
    assert (old.generator, old.surrogate, old.archive, old.archive_size, old.offspring) == ("evolution", "none", True, 7, 3)
    new = load(None, ["perfedsde.archive=false", "perfedsde.generator=random"])
    assert from_run(tomllib.loads(to_toml(new)), True) == new
    with pytest.raises(InvalidConfig, match="perfedsde is a table"):
        from_run({"perfedsde": 3}, True)


# -- files that settings are written to -----------------------------------------------


def round_trip(settings: Settings) -> Settings:
    return from_table(tomllib.loads(to_toml(settings)))


def test_defaults_survive_the_round_trip() -> None:
    assert round_trip(load(None)) == load(None)


@pytest.mark.parametrize("name", presets())
def test_a_preset_loads_says_what_it_is_and_survives_the_round_trip(name: str) -> None:
    settings = load(name)
    assert settings != load(None) and round_trip(settings) == settings
    assert len(presets()[name]) > 10 and not presets()[name].startswith("#")


def test_everything_that_can_be_set_is_in_the_file() -> None:
    """Not equality alone: a setting that is neither written nor different from its default would pass that."""
    table = tomllib.loads(to_toml(load(None)))
    written = {f"{key}.{inner}" for key, value in table.items() if isinstance(value, dict) for inner in value}
    written |= {key for key, value in table.items() if not isinstance(value, dict)}
    assert written == {key for key, _, _ in explain()}


def test_every_changed_setting_survives_the_round_trip() -> None:
    changed = load(
        None,
        [
            *("method=fedavg", "seed=5", "clients=5", "participants=5", "rounds=2", "protocol=paper", 'data.folder="a \\"b\\" c\\\\d"'),
            *("split.alpha=0.001", "training.rate=1e-9", "training.flip=false", "training.finetune_rates=[]", "run.checkpoint_every=3"),
            *("mobilenetv3.strides=[1,1,1,1,1]", "mobilenetv3.width=0.05", "perfedsde.mutation=1", "local.architecture=smallest"),
        ],
    )
    assert changed.data.folder == 'a "b" c\\d'
    assert round_trip(changed) == changed


@pytest.mark.parametrize("text", [*map(chr, range(32)), *map(chr, range(127, 160)), "a\rb", "\x1b[0m", "\r\n", "\u2028\ufeff"])
def test_control_characters_survive_the_round_trip(text: str, tmp_path: Path) -> None:
    settings = from_table({"run": {"folder": text}})
    assert settings.run.folder == text and round_trip(settings) == settings
    (tmp_path / "config.toml").write_bytes(to_toml(settings).encode())
    assert from_table(read_toml(tmp_path / "config.toml")) == settings


def test_read_toml_gives_the_table(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('a = 1\n[b]\nc = "d"\n')
    assert read_toml(tmp_path / "a.toml") == {"a": 1, "b": {"c": "d"}}


# -- explaining ---------------------------------------------------------------------------


def all_fields(kind: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(kind)
    for item in fields(kind):
        if is_dataclass(hints[item.name]):
            yield from all_fields(hints[item.name], f"{prefix}{item.name}.")
        elif (kind, item.name) != (Settings, "components"):
            yield f"{prefix}{item.name}", item


def test_every_setting_has_a_meaning_of_one_line() -> None:
    known = [*all_fields(Settings), *(pair for name, kind in component_types().items() for pair in all_fields(kind, f"{name}."))]
    for key, item in known:
        meaning = item.metadata.get("meaning", "")
        assert len(meaning) > 8 and "\n" not in meaning, key
    assert sorted(key for key, _ in known) == sorted(key for key, _, _ in explain())


def test_explain_shows_defaults_and_choices() -> None:
    lines = {key: (default, meaning) for key, default, meaning in explain()}
    assert lines["protocol"][0] == '"clean"' and lines["protocol"][1].endswith("(clean | paper)")
    assert lines["training.finetune_rates"][0] == "[0.02, 0.005, 0.001]" and lines["training.flip"][0] == "true"
    assert lines["mobilenetv3.width"][0] == "1.0"


def test_a_default_satisfies_its_own_limits() -> None:
    assert from_table(tomllib.loads(to_toml(load(None)))) == load(None)
    for key, default, _ in explain():
        load(None, [f"{key}={default}"])


def test_names_of_components_are_not_names_of_settings() -> None:
    """One rule: a name picks a component, and a table of that name holds its settings."""
    assert not {item.name for item in fields(Settings)} & set(component_types())
    assert set(config.ENGINES) <= set(component_types())


# -- settings that would exhaust a parser ---------------------------------------------------------------
@pytest.mark.parametrize(
    "override",
    [
        f"seed={'[' * 50_000}",
        f"seed={'{a=' * 10_000}",
        f"{'a.' * 30_000}b=1",
        f"seed.{'a.' * 30_000}b=1",
        f"seed={{{'a.' * 30_000}b=1}}",
        f"seed=0x{'f' * 10_000}",
        f"seed={'9' * 100_000}",
        f"clients=0x{'f' * 17}",
        f"training.crop=-0x{'f' * 20_000}",
        f"{'x' * 100_000}=1",
        f"method={'x' * 100_000}",
        f"data.folder={'[' * 400 + ']' * 400}",
        "seed=2024-01-01T00:00:00Z",
        f"training.rate={'1' * 400}.0e{'9' * 400}",
    ],
    ids=lambda override: override[:20],
)
def test_settings_that_nest_without_end_or_are_enormous(fedloom_: Fedloom, override: str) -> None:
    before = time.monotonic()
    outcome = fedloom_("run", "quickstart", override)
    check_refused(outcome, InvalidConfig)
    assert len(outcome.err) < 5000 and time.monotonic() - before < 10


@pytest.mark.parametrize(
    "text",
    [
        f"a = {'[' * 100_000}",
        f"{'a.' * 200_000}b = 1",
        f"[{'a.' * 200_000}b]",
        f"[{'a . ' * 100_000}b]",
        "".join(f'"{number}".' for number in range(50_000)) + "x = 1",
        f"seed = 1 # {'x' * 2_000_000}",
        "\x00",
        f'x = "{chr(92)}',
        "a" * 900_000,
        f'x = "{chr(92) * 900_000}',
        '"' * 900_000,
        "'x'." * 200_000,
    ],
    ids=lambda text: text[:12].encode("unicode_escape").decode(),
)
def test_a_settings_file_that_would_keep_its_parser_busy(fedloom_: Fedloom, tmp_path: Path, text: str) -> None:
    (tmp_path / "busy.toml").write_text(text)
    before = time.monotonic()
    check_refused(fedloom_("run", "busy.toml"), InvalidConfig)
    assert time.monotonic() - before < 10


def test_texts_with_many_dots_are_no_keys() -> None:
    dots = ".".join("a" * 30)
    assert load(None, [f"data.folder={'x/..' * 100}"]).data.folder == "x/.." * 100
    assert load(None, [f'data.folder="{dots}"']).data.folder == dots
