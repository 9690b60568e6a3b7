"""Budgets: what is drawn fits, what cannot fit is refused in words, and without a budget nothing changes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom import config
from fedloom.assemble import builder
from fedloom.assemble.builder import make_tools
from fedloom.config import Settings
from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidArchitecture, InvalidConfig
from fedloom.core.seeds import rng
from fedloom.data.readers import read
from fedloom.spaces.base import SPACES, ImageShape, SearchSpace
from fedloom.spaces.budget import Bounded, BudgetSettings, Limit, bounded, training_memory_mb
from fedloom.supernets.base import make_supernet
from fedloom.training import latency
from fedloom.training.latency import measure_latency
from support.checks import Fedloom, check_refused

IMAGE = ImageShape(channels=1, size=8, classes=3)
BATCH = 8
KEYS = ["parameters", "macs", "memory_mb", "latency_ms"]  # limits of a network; the others: test_fleet


@pytest.fixture(params=list(SPACES))
def space(request: pytest.FixtureRequest) -> SearchSpace:
    return SPACES[request.param].make(SPACES[request.param].settings.tiny(), IMAGE)


def needs(space: SearchSpace, key: str, architecture: Architecture) -> float:
    """What an architecture needs of a budget; a made-up latency grows with its work."""
    cost = space.cost(architecture)
    memory = 4e-6 * (3 * cost.parameters + BATCH * cost.activations)
    return {"parameters": cost.parameters, "macs": cost.macs, "memory_mb": memory, "latency_ms": cost.macs / 1e5}[key]


def within(space: SearchSpace, **most: float) -> SearchSpace:
    return bounded(space, BudgetSettings(**most), BATCH, lambda architecture: needs(space, "latency_ms", architecture))


def between(space: SearchSpace, key: str, share: float) -> float:
    """A budget at this share of the way from the smallest to the largest architecture."""
    low, high = (needs(space, key, space.named[name]) for name in ("smallest", "largest"))
    return low + share * (high - low)


def values_of(space: SearchSpace, architecture: Architecture) -> list[Any]:
    return [(gene.labels or gene.values)[choice] for gene, choice in zip(space.genes, architecture.choices, strict=True)]


def draws(space: SearchSpace, seed: int, count: int = 12) -> list[Architecture]:
    """Of every kind of draw some, none fed by the budget itself."""
    draw = rng("draws", seed)
    named = list(space.named.values())
    found = [space.sample(draw) for _ in range(count)]
    found += [Architecture(space.name, tuple(row.tolist())) for row in space.sample_many(draw, count)]
    found += [a for _ in range(2) for a in space.fair(draw)]
    found += [space.mutate(parent, draw, probability) for parent in named for probability in (0.0, 0.1, 1.0)]
    found += [space.crossover(first, second, draw) for first in named for second in named]
    found += [space.decode(draw.normal(0.5, 0.5, len(space.genes))) for _ in range(count)]
    return [*found, space.decode(np.ones(len(space.genes)))]


# -- draws --------------------------------------------------------------------------


def test_without_a_budget_the_space_is_itself(space: SearchSpace) -> None:
    assert within(space) is space


@pytest.mark.parametrize("key", KEYS)
def test_a_budget_that_excludes_nothing_changes_no_draw(space: SearchSpace, key: str) -> None:
    ample = within(space, **{key: 2 * between(space, key, 1.0)})
    assert isinstance(ample, Bounded) and draws(ample, 0) == draws(space, 0)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("share", [0.02, 0.3, 0.7])
def test_everything_drawn_fits(space: SearchSpace, key: str, share: float) -> None:
    most = between(space, key, share)
    narrow = within(space, **{key: most})
    for architecture in draws(narrow, 1):
        space.check(architecture)
        assert needs(space, key, architecture) <= most
    assert len(set(draws(narrow, 1))) > min(10, space.architectures // 4)  # and not always the same


def test_every_limit_holds_at_once(space: SearchSpace) -> None:
    limits = {key: between(space, key, share) for key, share in zip(KEYS, (0.2, 0.5, 0.3, 0.6), strict=True)}
    for architecture in draws(within(space, **limits), 2):
        assert all(needs(space, key, architecture) <= most for key, most in limits.items())


def test_a_limit_may_be_met_exactly(space: SearchSpace) -> None:
    largest = space.named["largest"]
    exact = within(space, macs=float(needs(space, "macs", largest)))
    assert exact.find("largest", rng(0)) == largest and exact.decode(space.encode(largest)) == largest


def test_a_draw_is_the_first_that_fits(space: SearchSpace) -> None:
    middle = sorted(needs(space, "macs", space.sample(rng("middle", seed))) for seed in range(31))[15]
    first, again = rng("first"), rng("first")
    expected = next(a for a in iter(lambda: space.sample(again), None) if needs(space, "macs", a) <= middle)
    assert within(space, macs=middle).sample(first) == expected


@pytest.mark.parametrize("key", ["parameters", "macs"])
def test_where_only_the_smallest_fits_it_is_all_there_is(space: SearchSpace, key: str) -> None:
    smallest = space.named["smallest"]
    only = within(space, **{key: needs(space, key, smallest)})
    for architecture in draws(only, 3, count=3):
        assert needs(space, key, architecture) <= needs(space, key, smallest)


def test_mutation_still_changes_something_where_hardly_anything_fits(space: SearchSpace) -> None:
    smallest, draw = space.named["smallest"], rng("narrow")
    one_more = min(
        needs(space, "macs", a)
        for a in (space.mutate(smallest, draw, 0.0) for _ in range(200))
        if needs(space, "macs", a) > needs(space, "macs", smallest)
    )
    narrow = within(space, macs=one_more)
    children = {narrow.mutate(smallest, draw, 0.1) for _ in range(60)}
    assert children - {smallest}


def test_a_reduced_architecture_keeps_what_it_can(space: SearchSpace) -> None:
    largest, smallest = space.named["largest"], space.named["smallest"]
    narrow = within(space, macs=between(space, "macs", 0.5))
    assert isinstance(narrow, Bounded)
    reduced = narrow.reduced(largest, rng("reduce"))
    changed = [gene for gene, choice in enumerate(reduced.choices) if choice != largest.choices[gene]]
    active = space.active(reduced.choices)
    assert changed and all(reduced.choices[gene] == smallest.choices[gene] for gene in changed if active[gene])
    assert reduced != smallest and needs(space, "macs", reduced) > between(space, "macs", 0.1)
    assert narrow.reduced(reduced, rng("again")) == reduced  # what fits stays


def test_decoding_depends_on_nothing_but_the_genes(space: SearchSpace) -> None:
    genes, most = rng("genes").uniform(0, 1, len(space.genes)), between(space, "macs", 0.1)
    assert within(space, macs=most).decode(genes) == within(space, macs=most).decode(genes)


def test_costs_are_asked_before_the_clock(space: SearchSpace) -> None:
    asked: list[Architecture] = []

    def clock(architecture: Architecture) -> float:
        asked.append(architecture)
        return 1.0

    most = between(space, "macs", 0.5)
    narrow = bounded(space, BudgetSettings(macs=most, latency_ms=2.0), BATCH, clock)
    for _ in range(20):
        narrow.sample(rng("clock"))
    assert asked and all(space.cost(architecture).macs <= most for architecture in asked)


def test_all_else_is_the_whole_space(space: SearchSpace) -> None:
    narrow, architecture = within(space, macs=between(space, "macs", 0.5)), space.named["medium"]
    assert (narrow.name, narrow.genes, narrow.named, narrow.architectures) == (space.name, space.genes, space.named, space.architectures)
    assert narrow.cost(architecture) == space.cost(architecture) and narrow.drawing(architecture) == space.drawing(architecture)
    assert np.array_equal(narrow.encode(architecture), space.encode(architecture)) and np.array_equal(narrow.sizes, space.sizes)
    assert np.array_equal(narrow.follows, space.follows)
    choices = space.sample_many(rng("choices"), 20)[:, ::-1] % space.sizes
    assert np.array_equal(narrow.active_many(choices), space.active_many(choices))
    assert np.array_equal(narrow.canonical_many(choices), space.canonical_many(choices))
    assert narrow.input_sizes([architecture.choices]) == space.input_sizes([architecture.choices])
    assert narrow.as_published(architecture) == space.as_published(architecture)
    assert narrow.supernet_as_published() == space.supernet_as_published()
    with pytest.raises(InvalidArchitecture):
        narrow.check(Architecture("other", ()))


def test_what_a_space_has_of_its_own_is_reached_through_its_budget(space: SearchSpace) -> None:
    narrow = within(space, macs=between(space, "macs", 0.5))
    own = [name for name in dir(space) if not name.startswith("_") and not hasattr(SearchSpace, name) and name != "name"]
    assert {"settings", "image"} < set(own)
    for name in own:
        assert getattr(narrow, name) == getattr(space, name), name
    again = copy.copy(narrow)
    assert isinstance(again, Bounded) and again.whole is space
    with pytest.raises(AttributeError, match="nothing"):
        narrow.nothing  # noqa: B018


def test_nothing_that_every_space_has_hides_what_this_space_has() -> None:
    """A class's own methods come before ``__getattr__``, so ``Bounded`` must say again all that it inherits."""
    everywhere = {name for name in vars(SearchSpace) if not name.startswith("_")}
    assert everywhere - set(vars(Bounded)) == {"sizes", "compact"}  # made of the genes


def test_darts_through_a_budget() -> None:
    space: Any = SPACES["darts"].make(SPACES["darts"].settings.tiny(), IMAGE)
    cell = space.named["darts_v2"]
    narrow: Any = within(space, macs=needs(space, "macs", cell))
    genotype = narrow.genotype(cell)
    assert narrow.from_genotype(genotype) == narrow.find(str(genotype), rng(0)) == cell
    assert narrow.operations == space.operations and list(narrow.parts(cell)) == list(space.parts(cell))
    large = replace(genotype, normal=(("sep_conv_5x5", 0), ("sep_conv_5x5", 1)) * 4)
    assert not narrow.fits(narrow.from_genotype(large))  # a translation, whether it fits or not
    with pytest.raises(InvalidConfig, match=r"The architecture Genotype\(.* needs"):
        narrow.find(str(large), rng(0))


# -- refusals -------------------------------------------------------------------------


@pytest.mark.parametrize("key", KEYS)
def test_a_budget_that_nothing_meets(space: SearchSpace, key: str) -> None:
    least = needs(space, key, space.named["smallest"])
    with pytest.raises(InvalidConfig) as caught:
        within(space, **{key: least * 0.99})
    message = str(caught.value)
    assert message.startswith(f"budget.{key} (") and "the architecture named smallest needs" in message and "0 is no limit" in message
    assert caught.value.facts["key"] == f"budget.{key}"
    shown = float(message.split("needs ")[1].split(" ")[0].replace(",", ""))
    assert least <= shown < least + 0.01
    within(space, **{key: shown})  # the number it names suffices


def test_the_architecture_named_smallest_need_not_be_the_least() -> None:
    """A DARTS cell without any operation trains in less memory than the one named smallest, which pools; the refusal names that one."""
    space: Any = SPACES["darts"].make(SPACES["darts"].settings.tiny(), IMAGE)
    nothing = space.from_values(["none"] * 28)
    least = needs(space, "memory_mb", nothing)
    assert least < needs(space, "memory_mb", space.named["smallest"])
    with pytest.raises(InvalidConfig, match="the architecture named smallest needs"):
        within(space, memory_mb=least)


def test_a_network_asked_for_by_name_is_not_replaced(space: SearchSpace) -> None:
    most = between(space, "macs", 0.6)
    narrow, largest = within(space, macs=most), space.named["largest"]
    for text in ("largest", largest.id):
        with pytest.raises(InvalidConfig, match=r"needs .* multiply-accumulates, more than budget\.macs"):
            narrow.find(text, rng(0))
    with pytest.raises(InvalidConfig, match=r"needs .* multiply-accumulates, more than budget\.macs"):
        narrow.from_values(values_of(space, largest))
    assert narrow.from_values(values_of(space, space.named["smallest"])) == space.named["smallest"]
    assert narrow.find("smallest", rng(0)) == narrow.named["smallest"] == space.named["smallest"]
    assert narrow.named["largest"] == largest
    assert narrow.cost(narrow.find("random", rng(3))).macs <= most
    with pytest.raises(InvalidArchitecture, match="Did you mean 'largest'"):
        narrow.find("largst", rng(0))


def test_no_random_network_by_the_clock(space: SearchSpace) -> None:
    with pytest.raises(InvalidConfig, match=r"random architecture under budget\.latency_ms"):
        within(space, latency_ms=1e9).find("random", rng(0))


@pytest.mark.parametrize(("most", "shown"), [(20e6, "20,000,000"), (0.5, "0.5"), (1234.5678, "1,234.568"), (1e-6, "1e-06"), (100.0, "100")])
def test_numbers_are_shown_as_people_write_them(most: float, shown: str) -> None:
    assert str(Limit("macs", most, lambda architecture: 0.0, "")) == f"budget.macs ({shown})"


# -- in a run ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "value"),
    [("budget.macs=20e6", 20e6), ("budget.macs=20000000", 20e6), ("budget.macs=20_000_000", 20e6), ("budget.macs=0", 0.0)],
)
def test_a_budget_is_a_number_of_any_kind(override: str, value: float) -> None:
    macs = config.load(None, [override]).budget.macs
    assert macs == value and type(macs) is float


@pytest.mark.parametrize(("key", "value"), [("parameters", 100), ("macs", 1e3), ("memory_mb", 0.001), ("latency_ms", 1e-6)])
@pytest.mark.parametrize("method", ["perfedsde", "fedavg", "local"])
def test_a_budget_nobody_can_meet_is_refused_before_anything_is_written(
    fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, key: str, value: float, method: str
) -> None:
    outcome = fedloom_("run", tiny_file, f"method={method}", f"budget.{key}={value}")
    words = ("is too little for mobilenetv3", "the architecture named smallest needs", "Raise the budget")
    check_refused(outcome, InvalidConfig, f"budget.{key} (", *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_a_fixed_network_above_the_budget(
    fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, tiny: Callable[..., Settings], method: str
) -> None:
    least = make_tools(tiny(), read(tiny().data), torch.device("cpu")).space
    most = least.cost(least.named["smallest"]).parameters
    outcome = fedloom_("run", tiny_file, f"method={method}", f"{method}.architecture=medium", f"budget.parameters={most}")
    check_refused(
        outcome, InvalidConfig, "The architecture medium needs", "parameters, more than budget.parameters", f"({most:,})", "smallest"
    )
    assert list(tmp_path.iterdir()) == []
    assert fedloom_("run", tiny_file, f"method={method}", f"budget.parameters={most}").code == 0


def test_a_negative_budget(fedloom_: Fedloom, tiny_file: Path) -> None:
    check_refused(fedloom_("run", tiny_file, "budget.macs=-1"), InvalidConfig, "budget.macs must be at least 0")


def test_no_client_searches_above_the_budget(fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, tiny: Callable[..., Settings]) -> None:
    space = make_tools(tiny(), read(tiny().data), torch.device("cpu")).space
    most = between(space, "macs", 0.1)
    assert most < min(space.cost(space.sample(rng("all above", seed))).macs for seed in range(20))  # the budget is felt
    outcomes = [fedloom_("run", tiny_file, f"budget.macs={most}", f"run.folder={name}") for name in ("one", "two")]
    assert [outcome.code for outcome in outcomes] == [0, 0]
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "two")]
    assert all(client["macs"] <= most for client in results[0]["clients"])
    assert results[0]["clients"] == results[1]["clients"]  # counted budgets repeat
    for line in (tmp_path / "one" / "ledger.jsonl").read_text().splitlines():
        assert space.cost(Architecture.parse(json.loads(line)["architecture"])).macs <= most
    assert config.read_toml(tmp_path / "one" / "config.toml")["budget"]["macs"] == most


def test_a_search_ends_where_only_the_smallest_fits(
    fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, tiny: Callable[..., Settings]
) -> None:
    space = make_tools(tiny(), read(tiny().data), torch.device("cpu")).space
    smallest = space.named["smallest"]
    assert fedloom_("run", tiny_file, f"budget.macs={space.cost(smallest).macs}", "rounds=1", "run.folder=mine").code == 0
    result = json.loads((tmp_path / "mine" / "result.json").read_text())
    assert {client["architecture"] for client in result["clients"]} == {smallest.id}


def test_the_memory_budget_is_the_memory_of_the_ledger(tiny: Callable[..., Settings]) -> None:
    """Of a network trained alone by a client with at least a batch of examples."""
    tools = make_tools(tiny(), read(tiny().data), torch.device("cpu"))
    for architecture in tools.space.named.values():
        cost = tools.space.cost(architecture)
        alone = tools.training_memory_mb(architecture, stored=cost.parameters, examples=1000)
        assert alone == training_memory_mb(cost, cost.parameters, tools.training.batch)
        make_tools(tiny(f"budget.memory_mb={alone!r}"), read(tiny().data), tools.device).space.find(architecture.id, rng(0))
        with pytest.raises(InvalidConfig, match="MB to train it"):
            narrow = make_tools(tiny(f"budget.memory_mb={alone * 0.999!r}"), read(tiny().data), tools.device).space
            narrow.find(architecture.id, rng(0))


# -- latency -----------------------------------------------------------------------------


def test_latency_is_measured_once_per_architecture_and_only_if_limited(
    tiny: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Architecture] = []

    def measure(supernet: Any, architecture: Architecture, device: torch.device) -> float:
        asked.append(architecture)
        return 1.0

    monkeypatch.setattr(builder, "measure_latency", measure)
    dataset, draw = read(tiny().data), rng("latency")
    make_tools(tiny("budget.macs=1e12"), dataset, torch.device("cpu")).space.sample(draw)
    assert asked == []
    space = make_tools(tiny("budget.latency_ms=5"), dataset, torch.device("cpu")).space
    for _ in range(3):
        space.find("smallest", draw)
        space.sample(draw)
    assert len(asked) == len(set(asked)) == 4


def test_the_clock_shows_milliseconds_and_touches_nothing(space: SearchSpace) -> None:
    supernet, before = make_supernet(space.name, SPACES[space.name].settings.tiny(), IMAGE), torch.get_rng_state()
    for architecture in space.named.values():
        assert 0 < measure_latency(supernet, architecture, torch.device("cpu")) < 60_000
    assert torch.equal(torch.get_rng_state(), before)


def test_a_latency_is_the_median_after_warming_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long wait among many, and a slow start, do not show."""
    lasts = [9.0] * latency.WARM_UP + [0.002] * (latency.RUNS - 1) + [5.0]
    times = [moment for start, last in enumerate(lasts) for moment in (100.0 * start, 100.0 * start + last)]
    monkeypatch.setattr(latency.time, "perf_counter", iter(times).__next__)
    supernet = make_supernet("mobilenetv3", SPACES["mobilenetv3"].settings.tiny(), IMAGE)
    assert measure_latency(supernet, supernet.space.named["smallest"], torch.device("cpu")) == pytest.approx(2.0)


def test_a_run_within_a_latency(fedloom_: Fedloom, tiny_file: Path, tmp_path: Path) -> None:
    one = ("clients=1", "participants=1", "rounds=1", "perfedsde.population=2")
    assert fedloom_("run", tiny_file, "budget.latency_ms=60000", "run.folder=mine", *one).code == 0
    assert json.loads((tmp_path / "mine" / "result.json").read_text())["finished"]
