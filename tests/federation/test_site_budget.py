"""Budgets of sites: those of tiers are agreed on and cut what travels; a site's own stays at the site."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import FINISH
from fedloom.federation.agreement import SiteBudget, read_agreement, read_site
from support.federation import SITE
from support.site import Place, at, write_agreement

OWN = 300e3  # macs; the smallest network needs 231,168
Agreed = Callable[..., Path]


@pytest.fixture
def agreed(tmp_path: Path) -> Agreed:
    def write(budget: str = "", method: str = "perfedsde") -> Path:
        place = write_agreement(tmp_path / "agreed", method)
        file = place / "federation.toml"
        file.write_text(f"{file.read_text()}[budget]\n{budget}\n")
        return place

    return write


def networks(place: Place, monkeypatch: pytest.MonkeyPatch) -> list[Architecture]:
    """All that a site scores in a round and at the end, and its personal network."""
    seen: list[Architecture] = []
    scorer: Any = place.participant.method.tools.scorer  # type: ignore[attr-defined]
    known = scorer.score_subnets

    def noted(weights: Any, architectures: Any, *rest: Any) -> Any:
        seen.extend(architectures)
        return known(weights, architectures, *rest)

    monkeypatch.setattr(scorer, "score_subnets", noted)
    for action in ((0, "train"), (3, FINISH)):
        asked = place.data(*action)
        assert place.report(place.participant.answer(asked), asked).client == "north"
    (final,) = [entry for entry in place.store.read_ledger() if entry.final]
    return [*seen, Architecture.parse(final.architecture)]


def test_a_sites_own_budget_holds_and_stays_there(agreed: Agreed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = agreed()
    with at(place, tmp_path / "free") as free:
        asked, digest = free.data(0), free.agreement.digest
        cost = free.method.tools.space.cost
        assert any(cost(one).macs > OWN for one in networks(free, monkeypatch))
    with at(place, tmp_path / "own", budget=SiteBudget(macs=OWN)) as own:
        assert own.agreement.digest == digest and own.data(0) == asked  # nobody else can know it
        found = networks(own, monkeypatch)
        assert len(found) > 4 and all(cost(one).macs <= OWN for one in found)
        own.participant.settle()
        for name in ("left.jsonl", "statement.txt"):
            text = (own.store.folder / name).read_text()
            assert "budget" not in text and "300000" not in text.replace(",", "")
        fields = set(own.participant.answers.departures()[0].fields)
        assert fields == {"update", "coverage", "examples"}


def test_a_tiers_site_receives_its_part_and_may_have_less_of_its_own(
    agreed: Agreed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = agreed("tiers = [0, 1, 0]\nmacs = [0, 400e3]\nsupernet = [0, 60e3]")  # east, north, west
    with at(place, tmp_path / "own", budget=SiteBudget(macs=OWN)) as own:
        part = own.instruction().arrays["weights"]
        assert sum(array.size for array in part.values()) <= 60e3 < 171_930
        cost = own.method.tools.space.cost
        assert all(cost(one).macs <= OWN for one in networks(own, monkeypatch))
        entries = list(own.store.read_ledger())
        assert {entry.tier for entry in entries} == {1} and entries[0].bytes_up < 5 * 60e3
    with at(place, tmp_path / "east", "east") as east:
        assert sum(array.size for array in east.instruction().arrays["weights"].values()) == 171_930


@pytest.mark.parametrize(
    ("method", "words"),
    [("perfedrlnas", "chooses this site's networks and does not know"), ("heterofl", "Agree on a tier"), ("fedavg", "budget.macs")],
)
def test_where_the_server_chooses_a_sites_own_budget_is_refused(method: str, words: str, agreed: Agreed, tmp_path: Path) -> None:
    place = agreed(method=method)
    if method == "fedavg":  # whose network is known, and may fit
        with at(place, tmp_path / "fits", budget=SiteBudget(macs=OWN)):
            pass
        (place / "federation.toml").write_text((place / "federation.toml").read_text() + '[fedavg]\narchitecture = "largest"\n')
    with pytest.raises(InvalidConfig, match=words), at(place, tmp_path / "own", budget=SiteBudget(macs=OWN)):
        pass


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ("macs = [400e3, 0]", "which site is of which tier. Set budget.tiers"),
        ("macs = [400e3, 0]\ntiers = [0, 1]", "must have 3 numbers"),
        ('latency_ms = 5\nlatency_table = "phone.json"', "Set budget.latency_table in SITE.toml"),
    ],
)
def test_agreements_that_say_too_little_or_too_much(budget: str, words: str, agreed: Agreed) -> None:
    with pytest.raises(InvalidConfig, match=words):
        read_agreement(agreed(budget) / "federation.toml")


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ("macs = [1, 2]", "budget.macs must be a number"),
        ("tiers = [0]", "Unknown key 'budget.tiers'"),
        ("supernet = 5", "Unknown key 'budget.supernet'"),
    ],
)
def test_tiers_are_not_a_sites_own_matter(budget: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "site.toml"
    file.write_text(SITE.format(name="north", port=1, onnx="false") + f"[budget]\n{budget}\n")
    with pytest.raises(InvalidConfig, match=words):
        read_site(file)
    file.write_text(SITE.format(name="north", port=1, onnx="false") + '[budget]\nmacs = 5e5\nlatency_table = "phone.json"\n')
    assert read_site(file).budget == SiteBudget(macs=5e5, latency_table=str(tmp_path / "phone.json"))
