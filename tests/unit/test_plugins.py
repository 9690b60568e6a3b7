"""Components of the user's own: found from anywhere, imported once, and refused with the place of the mistake and its cure."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from fedloom import comparing, config, plugins
from fedloom.core.errors import InvalidConfig, UnusableFolder, UnusablePlugin
from fedloom.data.readers import DATASETS, DataSettings
from fedloom.methods.base import METHODS
from fedloom.search.base import SURROGATES
from fedloom.spaces.base import SPACES, ImageShape, SearchSpace
from fedloom.supernets.base import SUPERNETS, make_supernet
from fedloom.testing.nets import images_of, measured, weights_of
from fedloom.testing.plugged import plugged, taken_back
from support.checks import Fedloom, check_refused
from support.toy import TOY

HEAD = """
from dataclasses import dataclass, field
from fedloom.core.settings import setting
from fedloom.data.readers import DATASETS, Source, read_digits
from fedloom.methods.base import METHODS
from fedloom.methods.fedavg import FedAvg, FedAvgSettings
from fedloom.spaces.base import SPACES
from fedloom.search.base import SURROGATES
from fedloom.search.rbf import fit_rbf

@dataclass(frozen=True)
class Own:
    size: int = setting(3, "how large it is", low=1)

"""
GENE = HEAD + "from fedloom.spaces.base import Gene\n"
SPACE = HEAD + 'SPACES.add("mine", Own, "a space")(lambda settings, image: None)\n'
TABLES_IN_TABLES = """
@dataclass(frozen=True)
class Inner:
    rate: float = setting(0.5, "how deep it is")

@dataclass(frozen=True)
class Middle:
    inner: Inner = field(default_factory=Inner)
    name: str = setting("", "what it is called")
    sizes: tuple[int, ...] = setting((1, 2), "how large they are")

@dataclass(frozen=True)
"""
MIDDLE = "class Own:\n    middle: Middle = field(default_factory=Middle)"
NESTED = SPACE.replace("@dataclass(frozen=True)\nclass Own:", TABLES_IN_TABLES + MIDDLE)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    with taken_back():
        yield


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(tmp_path)

    def file(text: str, name: str = "mine.py") -> str:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        return name

    return file


# -- what works -----------------------------------------------------------------------------
def test_a_plugin_adds_its_name_and_its_settings(write: Callable[..., str], tmp_path: Path) -> None:
    settings = config.load(None, [f'plugins=["{write(SPACE)}"]', "space=mine", "mine.size=7"])
    assert settings.components["mine"].size == 7 and settings.plugins == (str(tmp_path / "mine.py"),)
    assert SPACES["mine"].meaning == "a space"
    assert ("mine.size", "3", "how large it is") in list(config.explain())


def test_it_is_kept_in_the_settings_and_found_from_anywhere(
    write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undo = plugins.remember()
    text = config.to_toml(config.load(None, [f'plugins=["{write(SPACE)}"]', "mine.size=7"]))
    undo()
    assert "mine" not in config.component_types() and "mine" not in sys.modules
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    write(text, "kept.toml")
    assert config.load(str(tmp_path / "kept.toml")).components["mine"].size == 7


def test_tables_in_its_table_survive_the_round_trip(write: Callable[..., str]) -> None:
    """In a file, as key=value, where they are explained, and where settings of two runs are compared."""
    name = write(NESTED)
    changes = ["mine.size=7", "mine.middle.inner.rate=1e-9", 'mine.middle.name="a\\nb"', "mine.middle.sizes=[4]"]
    settings = config.load(None, [f'plugins=["{name}"]', "space=mine", *changes])
    text = config.to_toml(settings)
    assert "\n[mine.middle]\n" in text and "\n[mine.middle.inner]\nrate = 1e-09\n" in text and "Inner(" not in text
    assert config.load(write(text, "kept.toml")) == settings
    own = settings.components["mine"]
    assert (own.size, own.middle.inner.rate, own.middle.name, own.middle.sizes) == (7, 1e-9, "a\nb", (4,))
    assert config.space_settings("mine", [], own) == own
    assert ("mine.middle.inner.rate", "0.5", "how deep it is") in list(config.explain())
    assert comparing._flat(settings)["mine.middle.inner.rate"] == 1e-9


def test_a_settings_file_names_plugins_beside_it(write: Callable[..., str], tmp_path: Path) -> None:
    write(SPACE, "below/mine.py")
    write('plugins = ["mine.py"]\n[mine]\nsize = 5', "below/base.toml")
    above = write('base = "below/base.toml"\n[mine]\nsize = 6', "above.toml")
    settings = config.load(above)
    assert settings.components["mine"].size == 6 and settings.plugins == (str(tmp_path / "below" / "mine.py"),)


def test_it_is_imported_once(write: Callable[..., str]) -> None:
    name = write(SPACE + 'open("times", "a").write("x")\n')
    for _ in range(3):
        config.load(None, [f'plugins=["{name}", "./{name}"]'])
    assert Path("times").read_text() == "x"


def test_files_of_one_folder_import_each_other(write: Callable[..., str]) -> None:
    write(SPACE, "first.py")
    second = write("import first\n" + HEAD + 'SURROGATES.add("mine", meaning="another")(fit_rbf)\n', "second.py")
    config.plug_in([second, "first.py"])
    assert "mine" in SURROGATES and SPACES["mine"]


def test_a_module_is_named_as_it_is_imported(write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    write("", "package_of_mine/__init__.py")
    write(SPACE, "package_of_mine/space.py")
    try:
        assert config.load(None, ['plugins=["package_of_mine.space"]']).plugins == ("package_of_mine.space",)
        assert SPACES["mine"]
    finally:
        for name in [name for name in sys.modules if name.startswith("package_of_mine")]:
            del sys.modules[name]


def test_every_kind_of_component(write: Callable[..., str]) -> None:
    config.plug_in(
        [
            write(f"""{HEAD}
METHODS.add("mine", FedAvgSettings, "a method")(FedAvg)
SURROGATES.add("mine", meaning="another")(fit_rbf)
DATASETS.add("mine", meaning="the digits again")(Source(read_digits))
""")
        ]
    )
    settings = config.load(None, ["method=mine", "data.name=mine", "perfedsde.surrogate=mine", "mine.architecture=smallest"])
    assert METHODS["mine"].make and settings.data.name == "mine" and settings.components["perfedsde"].surrogate == "mine"


def test_commands_without_run_settings_take_it(fedloom_: Fedloom, write: Callable[..., str]) -> None:
    name = write(SPACE)
    outcome = fedloom_("list", "spaces", "--plugin", name)
    assert outcome.code == 0 and "a space" in outcome.out
    assert "mine.size" in fedloom_("list", "settings", "--plugin", name).out
    check_refused(fedloom_("generate", "mine", "--plugin", name), InvalidConfig, "The space mine has no supernet", "plugins")
    card = fedloom_("space", "toy", "--plugin", TOY, "--size", 8)
    assert card.code == 0 and "2,457" in card.out, card


def test_a_comparison_knows_methods_of_plugins(write: Callable[..., str]) -> None:
    name = write(HEAD + 'METHODS.add("mine", FedAvgSettings, "a method")(FedAvg)\n')
    runs = comparing.plan("quickstart", [f'plugins=["{name}"]'], ["mine", "fedavg"], 1)
    assert [run.name for run in runs] == ["mine-0", "fedavg-0"] and all(f'plugins=["{name}"]' in run.command for run in runs)


# -- what every space and supernet need not say --------------------------------------------------
def test_what_a_space_does_not_say() -> None:
    with plugged(TOY):
        space: SearchSpace = SPACES["toy"].make(SPACES["toy"].settings(), ImageShape(1, 8, 10))
    assert [architecture.id for architecture in space.named.values()] == [
        "toy:0-0-0-0-0-0-0-0",
        "toy:1-1-1-1-0-1-1-0",
        "toy:2-2-2-2-2-2-2-2",
    ]
    assert space.architectures == 3 * (9 + 81 + 729)
    assert space.input_sizes([[0] * 8] * 2) == [0, 0]
    # width, depth, then the blocks in order: kernel and expansion of a block have one place
    chain = [{0}, {1}, {2, 5}, {3, 6}, {4, 7}]
    expected = {(i, j) for before, after in pairwise(chain) for i in before for j in after}
    assert {(i, j) for i in range(8) for j in range(8) if space.follows[i, j]} == expected
    rows = dict(space.drawing(space.named["medium"]).stages)
    assert [box.label for box in rows["toy"]] == ["12"] and [box.label for box in rows["stage 1"]] == ["2", "5", "5", "2", "2"]


def test_a_large_space_must_say_how_many_architectures_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with plugged(TOY):
        space = SPACES["toy"].make(SPACES["toy"].settings(), ImageShape(1, 8, 10))
    monkeypatch.setattr("fedloom.spaces.base.COUNTED", 1000)
    with pytest.raises(InvalidConfig, match=r"toy has too many architectures to count one by one. Give its class a property"):
        _ = space.architectures
    monkeypatch.setattr(type(space), "active_many", SearchSpace.active_many)  # every gene always has its effect
    assert space.architectures == 3**8


def test_a_network_that_a_supernet_does_not_say() -> None:
    """In training it normalises by its batch, as every torch network does; the contract tests have the rest."""
    with plugged(TOY):
        supernet = make_supernet("toy", SPACES["toy"].settings(), ImageShape(1, 8, 10))
    images, weights, architecture = images_of(supernet, 6), weights_of(supernet), supernet.space.named["medium"]
    own = supernet.take(weights, architecture)
    network = supernet.extract(weights, architecture, measured(supernet, own, architecture, images_of(supernet, 9, seed=1)))
    torch.testing.assert_close(network.train()(images), supernet.forward(images, own, architecture))
    again = copy.deepcopy(network.eval())
    assert torch.equal(again(images), network(images)) and not torch.equal(again(images), network.train()(images))


def test_a_supernet_without_masks_runs_sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    with plugged(TOY):
        kind = SUPERNETS["toy"].make
        supernet = type("Unmasked", (kind,), {"masked": kind.__mro__[1].masked})(SPACES["toy"].make(None, ImageShape(1, 8, 10)))
    assert kind.masks_pay and not supernet.masks_pay
    with pytest.raises(InvalidConfig, match=r"toy has no masked execution. Set training.execution=sliced"):
        supernet.masked(None, {}, None)


# -- what is refused ------------------------------------------------------------------------------
REFUSED = {
    "nothing": ("x = 1\n", "registers nothing: a plugin adds to a table of components"),
    "an error": ("\n\nx = 1 / 0\n", "mine.py, line 3: ZeroDivisionError: division by zero. --trace shows"),
    "an error in Fedloom": (HEAD + 'DATASETS["digits"].make.reader(None)\n', "mine.py, line 15: TypeError: read_digits() missing"),
    "no Python": ("x = (\n", "mine.py, line 1: SyntaxError: '(' was never closed"),
    "a missing library": ("import nothing_of_this_name\n", "line 1: ModuleNotFoundError: No module named 'nothing_of_this_name'"),
    "an end": ("raise SystemExit(0)\n", "mine.py, line 1: SystemExit: 0"),
    "a space's name": (SPACE.replace("mine", "darts"), "line 15: There is a search space named 'darts' already. Choose another name"),
    "a data set's name": (HEAD + 'DATASETS["digits"] = 1\n', "mine.py replaces the data set 'digits'. Choose another name"),
    "no entry": (
        HEAD + 'SURROGATES["mine"] = fit_rbf\n',
        "mine.py puts the surrogate 'mine' into its table itself. Register it: @SPACES.add(",
    ),
    "a setting's name": (SPACE.replace("mine", "training"), "cannot be named 'training', because settings of that name are something else"),
    "an engine's name": (SPACE.replace("mine", "inline"), "cannot be named 'inline'"),
    "a method's name": (SPACE.replace("mine", "local"), "the search space cannot be named 'local'"),
    "a strange name": (SPACE.replace('"mine"', '"my space"'), "'my space' needs a name of letters, digits and underscores"),
    "two names": (
        HEAD + 'class A:\n    name = "a"\nSPACES.add("b", Own, "")(A)\n',
        "the search space 'b' says name = 'a'. Write the same name in both places",
    ),
    "no method": (
        HEAD + 'METHODS.add("mine", Own, "")(lambda settings, tools: None)\n',
        "the method 'mine' must be a class that inherits fedloom.core.method.Method",
    ),
    "no settings": (SPACE.replace("Own,", "dict,"), "the settings of mine must be a frozen dataclass"),
    "one number for a gene's values": (
        GENE + 'Gene("width", 3)\n',
        "mine.py, line 16: The gene 'width' needs a tuple of numbers, such as (8, 12, 16), got 3. --trace",
    ),
    "a dictionary": (
        SPACE.replace("size: int = setting(3", "size: dict = setting(3"),
        "size of Own cannot be written to a file: use int, float, str, bool",
    ),
    "a list made anew": (
        SPACE.replace('size: int = setting(3, "how large it is", low=1)', "size: list = field(default_factory=list)"),
        "size of Own must be made with setting(",
    ),
    "a plain setting in a table in a table": (
        NESTED.replace('setting(0.5, "how deep it is")', "0.5"),
        "rate of Inner must be made with setting(",
    ),
    "a type that there is not": (SPACE.replace("size: int", 'size: "nothing"'), "the types in Own cannot be read (NameError: "),
    "a plain setting": (SPACE.replace('setting(3, "how large it is", low=1)', "3"), "size of Own must be made with setting("),
}


@pytest.mark.parametrize(("text", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_leaves_nothing_behind(write: Callable[..., str], fedloom_: Fedloom, text: str, reason: str) -> None:
    before = {what: dict(table) for what, table in plugins.TABLES.items()}
    name = write(text)
    for _ in range(2):  # the second time as the first: nothing of it is thought to be imported
        check_refused(fedloom_("list", "spaces", "--plugin", name), UnusablePlugin, reason, name)
    assert {what: dict(table) for what, table in plugins.TABLES.items()} == before and "mine" not in sys.modules
    write(SPACE)
    assert fedloom_("list", "spaces", "--plugin", name).code == 0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("none.py", "There is no plugin file"),
        ("no_module.of_this_name", "Python finds no module 'no_module.of_this_name' for a plugin. Install it, or name a file"),
        ("a/path", "Python finds no module 'a/path'"),
        ("", "Python finds no module ''"),
        ("my-space.py", "name the file like a Python variable"),
        ("random.py", "has the name of another module"),
        ("tomllib.py", "has the name of another module"),
        ("wave.py", "has the name of another module"),  # nobody has imported it yet
    ],
)
def test_what_cannot_be_found(write: Callable[..., str], fedloom_: Fedloom, name: str, reason: str) -> None:
    if name.endswith(".py") and name != "none.py":
        write(SPACE, name)
    check_refused(fedloom_("run", "quickstart", f'plugins=["{name}"]'), UnusablePlugin, reason)
    assert not Path("runs").exists()


@pytest.mark.parametrize("value", ["3", "mine.py", "[3]", '{a = "b"}'])
def test_plugins_are_a_list_of_names(fedloom_: Fedloom, value: str) -> None:
    check_refused(fedloom_("run", "quickstart", f"plugins={value}"), InvalidConfig, "plugins")


def test_a_run_whose_plugin_has_gone_is_not_called_damaged(write: Callable[..., str], fedloom_: Fedloom, tiny_file: Path) -> None:
    name = write(HEAD + 'METHODS.add("mine", FedAvgSettings, "a method")(FedAvg)\n')
    ran = fedloom_("run", tiny_file, f'plugins=["{name}"]', "method=mine", "mine.architecture=smallest", "rounds=1", "run.folder=it")
    assert ran.code == 0, ran
    with taken_back():
        assert fedloom_("resume", "it").code == 0
        assert fedloom_("export", "it", "--client", "client-000").code == 0
    Path(name).rename("moved.py")
    for table in plugins.TABLES.values():
        table.pop("mine", None)
    sys.modules.pop("mine")
    for command in (("resume", "it"), ("analyse", "costs", "it", "--trust-plugins")):
        check_refused(fedloom_(*command), UnusablePlugin, "There is no plugin file", "mine.py. Put it there")


# -- looking at somebody's run ------------------------------------------------------------
TRAP = (
    HEAD
    + """
from pathlib import Path
Path("imported").touch()
METHODS.add("mine", FedAvgSettings, "a method")(FedAvg)
"""
)


def test_looking_at_a_run_imports_no_code_that_its_folder_names(write: Callable[..., str], fedloom_: Fedloom, tiny_file: Path) -> None:
    name, trap = write(TRAP), Path("imported")
    with taken_back():
        ran = fedloom_("run", tiny_file, f'plugins=["{name}"]', "method=mine", "rounds=1", "run.folder=all/it")
    assert ran.code == 0 and trap.exists(), ran
    trap.unlink()
    shown, page = fedloom_("show", "all/it"), fedloom_("report", "all/it")
    missing = f"The run needs the plugin {Path(name).absolute()}. Looking at a run imports no code that its folder names"
    assert shown.code == 0 and "client-000" in shown.out and missing in shown.out and "add --trust-plugins" in shown.out, shown
    assert page.code == 0 and missing in Path("all/it/report.html").read_text(), page
    one = fedloom_("show", "all/it", "--client", "client-000")
    assert one.code == 0 and "mobilenetv3:" in one.out and missing in one.out, one
    analyses = ("costs", "memory", "pace", "phases", "policies", "figure3")
    for command in (("gain",), ("join",), *(("analyse", which) for which in analyses)):
        check_refused(fedloom_(*command, "all/it"), UnusablePlugin, missing)
    assert fedloom_("export", "all/it", "--client", "client-000").code == 0  # its space is one of ours
    assert fedloom_("draw", "all/it", "--client", "client-000").code == 0
    assert not trap.exists()
    with taken_back():
        trusted = fedloom_("show", "all/it", "--trust-plugins")
        assert trusted.code == 0 and missing not in trusted.out and trap.exists(), trusted
    with taken_back():
        assert fedloom_("analyse", "costs", "all/it", "--trust-plugins").code == 0
        assert fedloom_("report", "all/it", "--trust-plugins").code == 0 and missing not in Path("all/it/report.html").read_text()


def test_a_comparison_imports_nothing_from_the_runs_it_finds(write: Callable[..., str], fedloom_: Fedloom, tiny_file: Path) -> None:
    name, trap = write(TRAP), Path("imported")
    with taken_back():
        text = config.to_toml(config.load(str(tiny_file), [f'plugins=["{name}"]', "method=fedavg"]))
    trap.unlink()
    write(text, "all/fedavg-0/config.toml")
    check_refused(fedloom_("compare", tiny_file, "--methods", "fedavg", "run.folder=all"), UnusableFolder, "another plugin", "mine.py")
    assert not trap.exists()


def test_networks_of_an_own_space_need_a_trusted_plugin(fedloom_: Fedloom, tiny_file: Path) -> None:
    with taken_back():
        ran = fedloom_("run", tiny_file, f'plugins=["{TOY}"]', "space=toy", "method=fedavg", "rounds=1", "run.folder=it")
    assert ran.code == 0, ran
    for command in (("export", "it", "--client", "client-000"), ("draw", "it", "--client", "client-000")):
        check_refused(fedloom_(*command), UnusablePlugin, "The run needs the plugin", "toy_supernet.py", "add --trust-plugins")
        assert "toy" not in SPACES
        for trust in (("--trust-plugins",), ("--plugin", TOY)):
            with taken_back():
                assert fedloom_(*command, *trust).code == 0


def test_choices_of_a_setting_are_those_there_are_now() -> None:
    name = next(item for item in DataSettings.__dataclass_fields__.values() if item.name == "name")
    assert name.metadata["choices"] is DATASETS
