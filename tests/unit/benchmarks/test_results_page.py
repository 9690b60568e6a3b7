"""docs/results.md is what the records say: every table and the figure, every row with command and commit, no record forgotten."""

from __future__ import annotations

import json
import re
import shlex
from fnmatch import fnmatch
from pathlib import Path
from statistics import fmean

import families
import pytest
import recipe
import results_page
from results_page import PAGE, RESULTS, Rows

from fedloom import config

NO_CLIENTS = (
    *("cifar100-control-rate-0.1", "cifar10-200-control", "cifar10-200-control-drift"),
    *("cifar10-200-drift", "cifar10-200-frozen"),
)
NAMED = {name for own in families.FAMILIES.values() for family in own for name in (*family.records, *family.runs.values())}
EACH = [pytest.param(family, id=f"{name}-{number}") for name, own in families.FAMILIES.items() for number, family in enumerate(own)]


@pytest.fixture(scope="module")
def blocks() -> dict[str, str]:
    return results_page.blocks()


def test_page_and_figure_are_what_the_records_say(blocks: dict[str, str]) -> None:
    there = {found[2]: found[0] for found in results_page.BLOCK.finditer(PAGE.read_text())}
    assert there.keys() == blocks.keys()
    cure = "Write it again with python benchmarks/results_page.py"
    assert [name for name, text in blocks.items() if f"\n\n{text}\n\n" not in there[name]] == [], cure
    assert results_page.FIGURE.read_bytes() == results_page.pictures(results_page.curves())["svg"], cure


def test_every_record_of_accuracy_is_on_the_page_or_left_out_for_a_reason() -> None:
    kinds = ("recipe-*", "baselines-*", "fleet*", "cifar10*", "quickstart*")
    for name in sorted(path.stem for path in RESULTS.glob("*.json") if any(fnmatch(path.stem, kind) for kind in kinds)):
        left_out = [pattern for pattern in families.LEFT_OUT if fnmatch(name, pattern)]
        assert (name in NAMED) + len(left_out) == 1, f"{name} needs one place in benchmarks/families.py"


@pytest.mark.parametrize("dataset", list(families.FAMILIES))
def test_every_row_names_a_commit_and_a_record_with_its_command(dataset: str, blocks: dict[str, str]) -> None:
    table, _, commands = blocks[dataset].partition("<details>")
    titles, _, *rows = (line.split(" | ") for line in table.strip().splitlines())
    assert titles[-2:] == ["commit", "record |"] and len({len(row) for row in (titles, *rows)}) == 1
    for *_, commits, records in rows:
        assert all(re.fullmatch(r"[0-9a-f]{7}(\+changed)?", commit) for commit in commits.split(", ")), commits
        names = re.findall(r"\[([\w.-]+)\]", records)
        assert names and all(
            re.search(rf"^- \[{re.escape(name)}\]\([^)]*\): `(python benchmarks/|fedloom )", commands, re.M) for name in names
        )


@pytest.mark.parametrize("family", EACH)
def test_accuracies_are_the_means_over_clients(family: families.Family) -> None:
    """By hand, from every record that has clients; runs that are in two records are the same in both."""
    rows = results_page.family_rows(family)
    cards = results_page.comparison_card(recipe.results_of(rows))["methods"]
    for card in cards:
        means = []
        for seed, one in rows[card["method"]].items():
            if not one["accuracy"]:
                assert set(one["records"]) <= set(NO_CLIENTS)
                continue
            means.append(sum(one["accuracy"].values()) / len(one["accuracy"]))
            row = next(row for row in card["runs"] if row["seed"] == seed)
            assert row["mean"] == pytest.approx(means[-1], abs=1e-6)
            assert one.get("statistics", row)["mean"] == pytest.approx(means[-1], abs=1e-6), "what the record says of itself"
        assert not means or card["accuracy"]["mean"] == pytest.approx(fmean(means), abs=1e-6)
    for arm, name in family.runs.items():
        seed, run = results_page.run_row(name)
        one = rows[arm][seed]
        assert one["seconds"] == pytest.approx(run["seconds"]) and one["gmacs"] == pytest.approx(run["gmacs"])
        if one["accuracy"]:
            assert run["statistics"]["mean"] == pytest.approx(fmean(one["accuracy"].values()), abs=1e-6)


@pytest.mark.parametrize("family", EACH)
def test_rounds_and_split_are_those_of_the_records(family: families.Family) -> None:
    records = {name: results_page.read(name) for name in (*family.records, *family.runs.values())}
    for record in records.values():
        settings = record.get("settings", {})
        if "split.rule" in settings:
            assert (settings["rounds"], f"{settings['split.rule']} {settings['split.alpha']}") == (family.rounds, family.split)
        elif "split" in settings:
            assert (settings["rounds"], f"{settings['split']['rule']} {settings['split']['alpha']}") == (family.rounds, family.split)
        for by_seed in record.get("arms", {}).values():
            assert all(len(one["course"]) == family.rounds for one in by_seed.values() if "course" in one)
    for arm in family.arms if len(records) > 1 else ():
        assert len({json.dumps(record["settings"][arm]) for record in records.values()}) == 1, f"{arm} is pooled over other settings"


def test_an_arm_is_compared_with_the_first_of_its_family_and_with_scaffold() -> None:
    def row(**accuracy: float) -> dict[str, object]:
        return {"accuracy": accuracy, "seconds": 1.0, "gmacs": 2.0, "commit": "1234567890+changed", "records": ["mine"]}

    rows: Rows = {
        "control": {1: row(a=0.5, b=0.5), 2: row(a=0.5, b=0.5)},
        "control-drift": {1: row(a=0.5, b=0.6), 2: row(a=0.5, b=0.6)},
        "drift": {1: row(a=0.6, b=0.8), 2: row(a=0.6, b=0.8)},
    }
    family = families.Family(5, "label 0.3", tuning="tuning")
    first, second, third = (
        results_page.line(family, card, rows) for card in results_page.comparison_card(recipe.results_of(rows))["methods"]
    )
    assert first["against the control"] == "control" and first["test accuracy, %"] == "50.00 ± 0.00" and first["p, Holm"] == ""
    assert second["against the control"].startswith("+5.00 (") and second["against `scaffold`"] == ""
    assert third["against the control"].startswith("+20.00 (") and third["against `scaffold`"].startswith("+15.00 (")
    assert third["seeds"] == "1–2 (tuning)" and third["commit"] == "1234567+changed" and third["MB up"] == ""
    assert results_page.seeds_in_words([4, 2]) == "2, 4"


def test_the_control_comes_first_and_a_stopped_run_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    done, environment = {"accuracy": {"a": 0.5}, "seconds": 1.0, "gmacs": 2.0}, {"commit": "1234567"}
    arms = {"drift": {}, "control-drift": {"1": done}, "control": {"1": done, "2": done}}
    cost = {"seconds": 3.0, "trained_macs": 4e9, "bytes_up": 5e6}
    part = {"settings": {"seed": 1}, "cost": cost, "accuracy": {"mean": None, "std": None}, "finished": False, "rounds": 7}
    (tmp_path / "part.json").write_text(json.dumps({**part, "environment": environment}))
    family = families.Family(9, "label 0.3", ("arms",), {"drift": "part", "control": "part"})

    (tmp_path / "arms.json").write_text(json.dumps({"arms": arms, "environment": environment}))
    rows = results_page.family_rows(family)
    assert list(rows) == ["control", "drift", "control-drift"] and list(rows["drift"]) == [1]
    assert (
        rows["control"][1]["records"] == ["arms", "part"] and rows["control"][1]["bytes_up"] == 5e6 and "bytes_up" not in rows["control"][2]
    )
    _, stopped, _ = (results_page.line(family, card, rows) for card in results_page.comparison_card(recipe.results_of(rows))["methods"])
    assert stopped["test accuracy, %"] == "stopped after round 7: no personal models" and stopped["MB up"] == "5"

    (tmp_path / "arms.json").write_text(json.dumps({"arms": {**arms, "drift": {"2": done}}, "environment": environment}))
    assert list(results_page.family_rows(family)["drift"]) == [2]


def test_a_mean_of_ten_rounds_stands_at_the_last_of_them() -> None:
    assert results_page.smoothed({number: number / 100 for number in range(1, 12)}) == pytest.approx({10: 0.055, 11: 0.065})


def test_the_words_of_the_page_have_no_number_that_its_tables_do_not_have(blocks: dict[str, str]) -> None:
    words = results_page.BLOCK.sub("", PAGE.read_text()).replace("0.06 before", "")  # the least p of five pairs
    words = re.sub(r"`[^`]*`|\]\([^)]*\)", "", words)
    assert [number for number in re.findall(r"\d+\.\d+", words) if not any(number in text for text in blocks.values())] == []


def test_the_commands_for_what_is_missing_can_be_run() -> None:
    commands = [
        found for row in PAGE.read_text().partition("## What is missing")[2].splitlines() for found in re.findall(r"`([^`]+)`", row)
    ]
    runs = [shlex.split(command) for command in commands if command.startswith(("fedloom ", "python benchmarks/recipe.py "))]
    assert len(runs) > 10
    for program, what, source, *rest in runs:
        settings = [word for word in rest if "=" in word]
        methods = rest[rest.index("--methods") + 1].split(",") if "--methods" in rest else []
        for method in methods or [""]:
            assert config.load(source, [*settings, *([f"method={method}"] if method else [])]).rounds
        if program == "python":
            assert what == "benchmarks/recipe.py" and set(rest[rest.index("--arms") + 1].split(",")) <= recipe.ARMS.keys()
            name = Path(rest[rest.index("--name") + 1] if "--name" in rest else f"recipe-{source}")
            before = recipe.RESULTS / f"{name}.json"
            known = json.loads(before.read_text())["settings"] if before.exists() else {}
            for arm in rest[rest.index("--arms") + 1].split(","):
                assert known.get(arm, recipe.changes_of(arm, source, [])) == recipe.changes_of(arm, source, []), "it would refuse to join"
