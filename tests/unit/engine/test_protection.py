"""Noise in updates: who adds it, what it protects by dp-accounting, and where it is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld, rdp

from fedloom.assemble import new_run, resume_run
from fedloom.config import Settings
from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import Report
from fedloom.core.privacy import Departures, PrivacySettings
from fedloom.engine.protection import Account, Protection, simulated
from fedloom.engine.run import Watcher
from fedloom.engine.store import Store
from fedloom.files import read_arrays
from fedloom.maths.privacy import length
from fedloom.methods.base import AveragingMethod
from fedloom.report.words import privacy_words
from support.checks import Fedloom

ROUNDS = ("abcde",) * 10
DRAWN = ("ab", "cd", "ac", "ad")
MISSED = ("abcd", "abc", "ab", "abcd")
SCHEDULES: list[tuple[Sequence[str], int, float, list[float], list[float]]] = [
    # who sent in each round, participants, noise; noise multipliers by hand: of the worst client's updates, and of the sums they are in
    (ROUNDS, 5, 2.0, [2 / 5**0.5] * 10, [2.0] * 10),
    (DRAWN, 2, 3.0, [3 / 2**0.5] * 3, [3.0] * 3),  # a is drawn three times
    (MISSED, 4, 4.0, [2.0] * 4, [4.0, 4 * (3 / 4) ** 0.5, 4 * (2 / 4) ** 0.5, 4.0]),  # a is always there; shares of the others are missing
]


def departures(rounds: Sequence[str]) -> Departures:
    made = Departures()
    for number, clients in enumerate(rounds):
        for client in clients:
            made.add(client, number, late=False)
    return made


def composed(multipliers: Sequence[float], accountant: Any) -> float:
    for multiplier in multipliers:
        accountant.compose(dp_accounting.GaussianDpEvent(multiplier))
    return float(accountant.get_epsilon(1e-5))


@pytest.mark.parametrize(("rounds", "participants", "noise", "alone", "summed"), SCHEDULES)
def test_epsilon_is_that_of_dp_accounting(
    rounds: Sequence[str], participants: int, noise: float, alone: list[float], summed: list[float]
) -> None:
    found = Account(PrivacySettings(clip=3.0, noise=noise), participants).spent(departures(rounds))["epsilon"]
    for reader, multipliers in (("server", alone), ("others", summed)):
        assert found[reader] == pytest.approx(composed(multipliers, pld.PLDAccountant()), rel=1e-3)
        assert found[reader] < composed(multipliers, rdp.RdpAccountant())  # which gives a looser bound of the same


def test_a_late_update_has_left_but_is_in_no_sum() -> None:
    made, account = departures(["ab"]), Account(PrivacySettings(clip=1.0, noise=2.0), 2)
    before = account.spent(made)["epsilon"]
    made.add("a", 1, late=True)
    made.add("b", 1, late=True)
    after = account.spent(made)["epsilon"]
    assert after["server"] > before["server"] and after["others"] == before["others"]


def test_with_secure_sums_the_server_reads_no_more_than_others() -> None:
    plain, secure = (Account(PrivacySettings(clip=1.0, noise=2.0, secure=own), 5) for own in (False, True))
    assert plain.spent(departures(ROUNDS))["epsilon"]["server"] > plain.spent(departures(ROUNDS))["epsilon"]["others"]
    same = secure.spent(departures(ROUNDS))
    assert same["epsilon"]["server"] == same["epsilon"]["others"] == plain.spent(departures(ROUNDS))["epsilon"]["others"]
    assert secure.at_site(10)["epsilon"] == same["epsilon"] and "the server among them" in privacy_words(same)


def test_without_reports_nothing_is_lost_and_without_noise_nothing_is_claimed() -> None:
    assert Account(PrivacySettings(clip=1.0, noise=2.0), 2).spent(Departures())["epsilon"] == {"server": 0.0, "others": 0.0}
    assert Account(PrivacySettings(clip=1.0), 2).spent(departures(["ab"])) == {}


def test_shares_of_all_participants_add_up_to_the_noise_of_the_sum() -> None:
    protection = Protection(PrivacySettings(clip=2.0, noise=3.0), 4, simulated(0))
    nothing = {"w": np.zeros(50_000, np.float32)}
    sent = [protection.of(Report(name, 0, {"update": nothing}, {"examples": 17})) for name in "abcd"]
    assert [report.facts for report in sent] == [{"examples": 1}] * 4
    alone, together = sent[0].arrays["update"]["w"], sum(report.arrays["update"]["w"] for report in sent)
    assert np.std(alone) == pytest.approx(3.0, rel=0.02) and np.std(together) == pytest.approx(6.0, rel=0.02)
    later = protection.of(Report("a", 1, {"update": nothing}, {"examples": 17})).arrays["update"]["w"]
    assert abs(np.corrcoef(alone, later)[0, 1]) < 0.05  # other noise in every round: the same would cancel out


def test_noise_and_secure_sums_go_together(tiny: Callable[..., Settings], nobody: Watcher, tmp_path: Path) -> None:
    secure = ("privacy.secure=true", "privacy.least=2", "privacy.noise=2")
    new_run(tiny(*PRIVATE, *secure), tmp_path / "secure", nobody)
    new_run(tiny(*PRIVATE, "privacy.noise=2"), tmp_path / "plain", nobody)
    state, plain = (read_arrays(tmp_path / name / "state" / "server.safetensors")[0] for name in ("secure", "plain"))
    assert max(float(np.abs(state[name] - plain[name]).max()) for name in plain if name.startswith("weights/")) < 1e-4
    spent = json.loads((tmp_path / "secure" / "result.json").read_text())["privacy"]["epsilon"]
    assert spent["server"] == spent["others"]
    entry = next(iter(Store(tmp_path / "secure").read_ledger()))
    assert list(entry.upload_shapes) == ["update"] and "masked numbers (uint32)" in entry.upload_shapes["update"]


PRIVATE = ("method=perfedsde", "perfedsde.averaging=fedavg", "privacy.clip=0.01")


def received(settings: Settings, folder: Path, nobody: Watcher) -> tuple[list[Report], Any]:
    """What the server of a run receives, and the result."""
    absorb, found = AveragingMethod.absorb, []

    def listening(self: Any, state: Any, reports: Sequence[Report]) -> Any:
        found.extend(reports)
        return absorb(self, state, reports)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AveragingMethod, "absorb", listening)
        new_run(settings, folder, nobody)
    return found, json.loads((folder / "result.json").read_text())


def test_a_run_whose_updates_are_short(tiny: Callable[..., Settings], nobody: Watcher, tmp_path: Path) -> None:
    reports, result = received(tiny(*PRIVATE), tmp_path / "clipped", nobody)
    lengths = [length(report.arrays["update"]) for report in reports]
    assert all(0.00999 < value <= 0.01 for value in lengths)  # all were longer
    assert "privacy" not in result and all(int(report.facts["examples"]) > 1 for report in reports)


def test_a_run_with_noise_says_what_it_protects(tiny: Callable[..., Settings], nobody: Watcher, tmp_path: Path, fedloom_: Fedloom) -> None:
    settings, folder = tiny(*PRIVATE, "privacy.noise=8"), tmp_path / "run"
    reports, result = received(settings, folder, nobody)
    entries = np.concatenate([array.ravel() for report in reports for array in report.arrays["update"].values()])
    share = 8 / settings.participants**0.5
    assert np.std(entries) == pytest.approx(0.01 * share, rel=0.02)
    assert all(report.facts == {"examples": 1} for report in reports)
    counted = [(report.client, report.round) for report in reports]
    most = max(sum(client == name for client, _ in counted) for name, _ in counted)
    expected = {"server": composed([share] * most, pld.PLDAccountant()), "others": composed([8.0] * most, pld.PLDAccountant())}
    assert result["privacy"]["epsilon"] == pytest.approx(expected, rel=1e-2) and result["privacy"]["delta"] == 1e-5
    assert resume_run(folder, nobody).privacy == result["privacy"]
    words = privacy_words(result["privacy"])
    assert f"epsilon = {result['privacy']['epsilon']['others']:.3g} against whoever" in words
    assert " ".join(words.split()) in " ".join(fedloom_("show", folder).out.split())
    assert fedloom_("report", folder).code == 0 and words in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["method=fedavg", "privacy.noise=1"], "multiples of privacy.clip, which is 0"),
        (["method=perfedsde", "privacy.noise=1", "privacy.clip=1"], "also sends coverage. Set perfedsde.averaging=fedavg"),
        (["method=perfedrlnas", "privacy.noise=1", "privacy.clip=1"], "also sends accuracy, seconds. Choose another method"),
        (["method=fedavg", "privacy.secure=true", "privacy.noise=20", "privacy.clip=1", "privacy.least=2"], "Set privacy.range="),
        (["method=fedavg", "fedavg.averaging=median", "privacy.noise=1", "privacy.clip=1"], "the server of fedavg computes something else"),
    ],
)
def test_noise_is_refused_where_it_would_protect_less_than_it_seems_to(
    tiny: Callable[..., Settings], nobody: Watcher, tmp_path: Path, overrides: list[str], said: str
) -> None:
    with pytest.raises(InvalidConfig, match=said):
        new_run(tiny(*overrides), tmp_path / "run", nobody)
    assert not (tmp_path / "run").exists()


def test_local_sends_nothing_and_needs_no_noise(tiny: Callable[..., Settings], nobody: Watcher, tmp_path: Path) -> None:
    new_run(tiny("method=local", "privacy.noise=1", "privacy.clip=1"), tmp_path / "run", nobody)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["privacy"]["epsilon"] == {"server": 0.0, "others": 0.0}


def test_without_an_accountant_noise_is_refused_before_the_run(
    tiny: Callable[..., Settings], nobody: Watcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(InvalidConfig, match=r"pip install 'fedloom\[privacy\]'"):
        new_run(tiny(*PRIVATE, "privacy.noise=8"), tmp_path / "run", nobody)
    assert not (tmp_path / "run").exists()
