"""`fedloom report`: what its page answers, what it says is missing, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from fedloom.assemble import new_run
from fedloom.config import Settings
from fedloom.core.errors import DamagedRun, InvalidConfig, UnusableFolder
from fedloom.core.result import LedgerEntry
from fedloom.engine.run import Watcher
from fedloom.report.figure import page_svg
from fedloom.report.neighbours import baselines_of
from fedloom.report.page import blocks
from fedloom.report.page.html import tag
from fedloom.report.page.several import comparison_figures
from fedloom.report.page.single import page
from fedloom.report.reading import open_run
from support.checks import Fedloom, check_refused
from support.report import Outline, made_up_run

GOLDEN = Path(__file__).parents[2] / "golden" / "runs"
SECTIONS = ("short", "help", "clients", "data", "architectures", "search", "cost", "privacy", "made")
HOSTILE = ["<script>alert(1)</script>", "\"'><img src=x onerror=alert(1)>", "$\\frac{1}{", "a\u202eb\x00\x1b[31m\ud800", "名" * 300]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without their pictures, for tests of words."""
    monkeypatch.setattr(blocks, "page_svg", lambda figure: "<svg></svg>")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The same four clients by three methods, side by side."""
    own = {"perfedsde": [0.9, 0.8, 0.7, 1.0], "local": [0.5, 0.9, 0.7, 0.8], "fedavg": [0.9, 0.85, 0.7, 0.95]}
    for method, accuracies in own.items():
        made_up_run(tmp_path / "runs" / f"{method}-0", method, accuracies=accuracies)
    return tmp_path / "runs"


def outline_of(folder: Path, *against: Path) -> Outline:
    return Outline(page(open_run(folder), baselines_of(folder, against)))


# -- one run ------------------------------------------------------------------------------


@pytest.mark.usefixtures("undrawn")
def test_the_page_answers_the_five_questions(fedloom_: Fedloom, runs: Path) -> None:
    done = fedloom_("report", runs / "perfedsde-0")
    assert done.code == 0 and done.out == f"{runs}/perfedsde-0/report.html\n", done.err
    text = (runs / "perfedsde-0" / "report.html").read_text()
    outline = Outline(text)
    assert set(SECTIONS) <= set(outline.words) and all(len(outline.words[key].strip()) > 100 for key in SECTIONS)
    short = outline.words["short"]
    assert "85.0 %" in short and "+12.5 on local" in short and "0.0 on fedavg" in short
    assert "2 of 4 clients better" in short and "client-001 (−10.0)" in short
    assert "4 architectures" in short and "12.5 s" in short and "coverage, examples and update" in short
    assert re.search(r"update.*1.00 kB.*6.00 kB", outline.words["privacy"], re.DOTALL)  # six reports
    assert "0123456789ab" in outline.words["made"] and "split.size" in outline.words["made"]
    assert len(outline.ids) == len(set(outline.ids))
    assert set(re.findall(r'href="#([^"]+)"', text)) <= set(outline.ids)


@pytest.mark.usefixtures("undrawn")
def test_baselines_are_finished_runs_of_the_same_split_and_seed(runs: Path, tmp_path: Path) -> None:
    run = runs / "perfedsde-0"
    assert [baseline.method for baseline in baselines_of(run)] == ["local", "fedavg"]
    shutil.rmtree(runs / "local-0")
    shutil.rmtree(runs / "fedavg-0")
    made_up_run(runs / "a", "local", seed=1)
    made_up_run(runs / "b", "local", finished=False)
    made_up_run(runs / "c", "local", overrides=["split.alpha=0.9"])
    made_up_run(runs / "d", "perfedrlnas")
    (runs / "e").mkdir()
    (runs / "e" / "config.toml").write_text("= nonsense")
    assert baselines_of(run) == []
    words = outline_of(run).words["help"]
    assert f"fedloom run {run}/config.toml method=local" in words and "method=fedavg" in words
    elsewhere = made_up_run(tmp_path / "else", "local", accuracies=[0.5] * 4, overrides=["training.batch=4", "perfedsde.population=3"])
    (found,) = baselines_of(run, [elsewhere])
    assert found.accuracies == {f"client-00{number}": 0.5 for number in range(4)} and found.differs == (
        "training.batch (4 there, 16 here)",
    )
    assert "+35.0 on local" in outline_of(run, elsewhere).words["short"]


def test_nothing_a_run_says_becomes_part_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "page_svg", lambda figure: page_svg(figure) if figure.key == "clients" else "")  # the one with names
    names = [*HOSTILE, "plain"]
    folder = made_up_run(tmp_path / "<b>run", clients=6, names=names, environment={"device": "<svg onload=alert(1)>", "commit": "`&amp;`"})
    text = page(open_run(folder), [])
    outline = Outline(text)
    assert not {"script", "img", "b"} & outline.tags and "onload=" not in re.sub(r"&lt;svg onload=alert\(1\)&gt;", "", text)
    assert "<script>alert(1)</script>" in outline.words["clients"] and "&amp;" in outline.words["made"]
    assert "\x00" not in text and "\x1b" not in text and text.encode()


def test_tags_escape_what_is_not_html() -> None:
    assert tag("p", "<", tag("b", "&"), None, title='"', hidden=True, class_=None) == '<p title="&quot;" hidden>&lt;<b>&amp;</b></p>'


# -- what a run does not have ------------------------------------------------------------------


def test_a_stopped_run_of_an_earlier_version(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "0.1.0-stopped", tmp_path / "stopped"))
    words = outline_of(folder).words
    assert "not finished: 1 of 2 rounds, 0 of 2 personal models" in words[""]
    assert "not yet" in words["short"] and f"fedloom resume {folder}" in words["clients"]
    assert "recorded only the sum of all fields" in words["privacy"] and "no scores of a population" in words["search"]


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    folder = made_up_run(tmp_path / "begun", finished=False)
    for name in ("result.json", "ledger.jsonl"):
        (folder / name).unlink()
    words = outline_of(folder).words
    assert "0 of 3 rounds" in words[""] and "No round has" not in words["help"]
    assert all("Missing." in words[key] for key in ("help", "clients", "architectures", "search", "cost", "made"))
    assert "Missing." not in words["data"].split("Accuracy against")[0]  # who holds what is known from the beginning


def test_one_client_and_one_round(tmp_path: Path) -> None:
    one = made_up_run(tmp_path / "one", clients=1, rounds=1, participants=1)
    words = outline_of(one).words
    assert "There is one round" in words["help"] and "The only client" in words["clients"]
    assert "at least three clients" in words["architectures"]


@pytest.mark.usefixtures("undrawn")
def test_no_rounds_and_no_generator(tmp_path: Path) -> None:
    alone = outline_of(made_up_run(tmp_path / "alone", "local", seed=3)).words
    assert "the method has no rounds" in alone["help"] and "Nothing left the clients" in alone["privacy"]
    assert "has no generator" in alone["search"] and "same architecture" in alone["architectures"]


@pytest.mark.usefixtures("undrawn")
def test_a_run_whose_data_are_gone(finished_run: Path) -> None:
    text = (finished_run / "config.toml").read_text()
    (finished_run / "config.toml").write_text(text.replace('name = "digits"', 'name = "cifar10"'))
    words = outline_of(finished_run).words
    assert "Missing." in words["data"] and "cifar10" in words["data"]
    assert "3×3 kernel" in words["architectures"]  # a personal model says what its images look like
    assert "what local training changed" in words["privacy"]


def test_a_run_stopped_among_its_personal_models(tmp_path: Path) -> None:
    folder = made_up_run(tmp_path / "nearly", accuracies=[0.9, 0.8, 0.7, 1.0])
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "finished": False, "clients": []}))
    lines = (folder / "ledger.jsonl").read_text().splitlines(keepends=True)
    (folder / "ledger.jsonl").write_text("".join(lines[:-2]))
    view = open_run(folder)
    assert [client.test_accuracy for client in view.clients] == [0.9, 0.8] and view.clients[0].parameters > 0
    assert "2 of 4 personal models" in view.spoken_state


# -- several runs -----------------------------------------------------------------------------


@pytest.mark.usefixtures("undrawn")
def test_a_folder_of_runs_gives_a_comparison(fedloom_: Fedloom, runs: Path, tmp_path: Path) -> None:
    done = fedloom_("report", runs)
    assert done.code == 0 and done.out == f"{runs}/report.html\n", done.err
    outline = Outline((runs / "report.html").read_text())
    assert "3 methods on digits" in outline.words[""] and "fedavg, 85.0 %" not in outline.words["short"].split("Mean")[0]
    assert "perfedsde 85.0 %" in outline.words["short"] and "local −12.5 points" in outline.words["short"]
    assert "least: perfedsde" in outline.words["short"] or "least: fedavg" in outline.words["short"]
    assert "There are none" in outline.words["settings"]
    assert all(len(outline.words[key].strip()) > 40 for key in ("help", "clients", "cost", "privacy", "settings", "made"))
    made_up_run(tmp_path / "other", "local", finished=False, seed=2, overrides=["training.batch=4"])
    done = fedloom_("report", runs / "perfedsde-0", runs / "local-0", tmp_path / "other", "--out", tmp_path / "three.html")
    words = Outline((tmp_path / "three.html").read_text()).words
    assert "not finished" in words["help"] and "training.batch" in words["settings"]


@pytest.mark.usefixtures("undrawn")
def test_a_sweep_has_a_block_for_each_value(fedloom_: Fedloom, tmp_path: Path) -> None:
    for rate, gain in ((0.1, 0.1), (0.3, -0.1)):
        own, place = [f"training.rate={rate}"], tmp_path / "swept" / f"training.rate={rate}"
        made_up_run(place / "fedrep-0", "fedrep", accuracies=[0.5, 0.6, 0.7, 0.8], overrides=own)
        made_up_run(place / "fedavg-0", "fedavg", accuracies=[value + gain for value in (0.5, 0.6, 0.7, 0.8)], overrides=own)
    done = fedloom_("report", tmp_path / "swept")
    assert done.code == 0, done.err
    words = Outline((tmp_path / "swept" / "report.html").read_text()).words["help"]
    for name, difference in (("0.1", "10.0"), ("0.3", "−10.0")):  # each against fedrep at its own rate
        row = words[words.index(f"fedavg, rate={name}") :]
        assert difference in row[: row.index("to")]
    assert "fedrep with the same training.rate" in words and "corrected for 2 comparisons (Holm)" in words
    for title in ("last participation", "best ever", "Test accuracy over time at clients", "Test accuracy over bytes sent up"):
        assert title in words


# -- the command --------------------------------------------------------------------------------


@pytest.mark.usefixtures("undrawn")
def test_figures_are_written_beside_the_page(fedloom_: Fedloom, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    monkeypatch.setattr("fedloom.commands.report.pictures", lambda figure: drawn.append(figure.key) or {"svg": b"s", "pdf": b"p"})
    done = fedloom_("report", runs / "perfedsde-0", "--figures", tmp_path / "figures", "--out", tmp_path / "page.html")
    assert done.code == 0 and f"{len(drawn)} figures as svg, png, pdf in {tmp_path}/figures" in done.out
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == sorted(
        f"{key}.{end}" for key in drawn for end in ("svg", "pdf")
    )
    assert len(drawn) >= 15 and not (runs / "perfedsde-0" / "report.html").exists()


@pytest.mark.usefixtures("undrawn")
def test_what_is_no_run_is_refused(fedloom_: Fedloom, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    check_refused(fedloom_("report", tmp_path / "nowhere"), DamagedRun, tmp_path / "nowhere", "config.toml")
    check_refused(fedloom_("report", tmp_path / "empty"), DamagedRun, "nor a folder of runs")
    check_refused(fedloom_("report", __file__), DamagedRun, "test_page.py")
    both = fedloom_("report", runs / "local-0", runs / "fedavg-0", "--against", runs / "perfedsde-0")
    check_refused(both, InvalidConfig, "--against")
    check_refused(fedloom_("report", runs / "local-0", "--out", tmp_path / "empty"), UnusableFolder, tmp_path / "empty")


@pytest.mark.parametrize(
    ("file", "content", "word"),
    [
        ("result.json", "{", "result.json is damaged"),
        ("result.json", '{"schema": "another/1"}', "another/1"),
        ("result.json", "[]", "result.json is damaged"),
        ("result.json", '{"schema": "fedloom.result/1", "clients": []}', "it has no 'method'"),
        ("config.toml", "method = ", "config.toml"),
        ("config.toml", 'method = "nonsense"', "config.toml"),
        ("ledger.jsonl", '{"client": 1}\n', "line 1"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_damaged_files_are_named(file: str, content: str, word: str, fedloom_: Fedloom, finished_run: Path) -> None:
    (finished_run / file).write_text(content)
    check_refused(fedloom_("report", finished_run), DamagedRun, word)
    assert not (finished_run / "report.html").exists()


NO_CLIENTS = [{"name": 3}, {"test_accuracy": "0.5"}, {"macs": None}, {"parameters": True}, {"test_accuracy": float("nan")}]


@pytest.mark.parametrize("change", NO_CLIENTS, ids=str)
def test_a_damaged_client_is_named(change: dict[str, object], fedloom_: Fedloom, finished_run: Path) -> None:
    result = json.loads((finished_run / "result.json").read_text())
    result["clients"][0] |= change
    (finished_run / "result.json").write_text(json.dumps(result))
    check_refused(fedloom_("report", finished_run), DamagedRun, "result.json", next(iter(change)))


# -- what it stands on ------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["perfedsde", "perfedrlnas"])
def test_the_ledger_has_bytes_by_field(method: str, tiny: Callable[..., Settings], nobody: Watcher, tmp_path: Path) -> None:
    new_run(tiny(f"method={method}", "rounds=1"), tmp_path / "run", nobody)
    entries = [LedgerEntry.from_json(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    for entry in entries:
        assert sum(entry.upload_bytes.values()) == entry.bytes_up and sorted(entry.upload_bytes) == list(entry.uploads)
    assert any(entry.upload_bytes for entry in entries)
    if method == "perfedsde":
        assert all(entry.notes["median_score"] <= entry.notes["best_score"] for entry in entries if not entry.final)


# -- what was wrong once ----------------------------------------------------------------------


@pytest.mark.usefixtures("undrawn")
def test_a_report_compares_with_the_method_that_the_comparison_named_first(fedloom_: Fedloom, runs: Path) -> None:
    (runs / "comparison.json").write_text('{"methods": ["fedavg", "local", "perfedsde"]}')
    assert fedloom_("report", runs).code == 0
    words = Outline((runs / "report.html").read_text()).words["help"]
    assert "against fedavg, points" in words and "Differences are to fedavg" in words


@pytest.mark.usefixtures("undrawn")
def test_best_is_said_only_where_the_interval_says_so(fedloom_: Fedloom, tmp_path: Path) -> None:
    for name, gains in (("clear", [0.10, 0.11, 0.09, 0.10]), ("unclear", [0.3, -0.25, 0.2, -0.2])):
        before = [0.5, 0.6, 0.7, 0.6]
        made_up_run(tmp_path / name / "fedrep-0", "fedrep", accuracies=[a + b for a, b in zip(before, gains, strict=True)])
        made_up_run(tmp_path / name / "fedavg-0", "fedavg", accuracies=before)
        assert fedloom_("report", tmp_path / name).code == 0
    clear, unclear = (Outline((tmp_path / name / "report.html").read_text()).words["short"] for name in ("clear", "unclear"))
    assert "fedrep, 70.0 %" in clear and "(95 % interval" in clear and "not clear" not in clear
    assert "not clear: fedrep and fedavg" in unclear and re.search(r"\+1.[23] points on fedavg \(95 % interval −", unclear)


def as_server(folder: Path) -> Path:
    """What the server of a federation has: no images, no accuracies, no architectures, no models."""
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    unknown = {"architecture": "", "test_accuracy": None, "validation_accuracy": None}
    (folder / "ledger.jsonl").write_text("".join(json.dumps({**line, **unknown}) + "\n" for line in lines))
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "clients": []}))
    (folder / "state" / "split.safetensors").unlink()
    (folder / "state" / "server.safetensors").touch()
    (folder / "federation.json").write_text("{}")
    return folder


@pytest.mark.usefixtures("undrawn")
def test_a_finished_federation_is_not_called_unfinished(fedloom_: Fedloom, tmp_path: Path) -> None:
    folder = as_server(made_up_run(tmp_path / "served"))
    shown, reported = fedloom_("show", folder), fedloom_("report", folder)
    assert shown.code == reported.code == 0, (shown, reported)
    page = (folder / "report.html").read_text()
    for text in (" ".join(shown.out.split()), page):
        assert "at the sites: the server knows none of them" in text and "finished" in text
        assert not re.search(r"not finished|models yet|not yet|fedloom resume|fedloom run", text)
    assert "4 personal models" in page


def test_a_client_with_one_class_is_remarked_on(fedloom_: Fedloom, tmp_path: Path) -> None:
    folder = made_up_run(tmp_path / "run", accuracies=[1.0, 0.8, 0.7, 0.9])
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "one_class": ["client-000"]}))
    words = "All test images of client-000 are of one class. Its accuracy says little"
    assert words in outline_of(folder).words["clients"] and words in " ".join(fedloom_("show", folder).out.split())


def test_a_course_of_one_round_can_be_seen(tmp_path: Path) -> None:
    views = [open_run(made_up_run(tmp_path / method, method, rounds=1)) for method in ("fedrep", "fedavg")]
    courses = [figure for figure in comparison_figures(views) if figure.key.startswith("course")]
    assert len(courses) == 3
    for figure in courses:
        axes = plt.figure().subplots()
        figure.fill(axes)
        assert [line.get_marker() for line in axes.lines] == ["o", "o"], figure.key
        plt.close()


def test_a_wide_table_cannot_widen_a_column_of_figures() -> None:
    """Six methods and three seeds make tables wider than the page: a column without a least width of 0 grows with them."""
    style = (Path(blocks.__file__).parent / "style.css").read_text()
    columns = re.findall(r"\.gallery[^{,]*\{[^}]*?grid-template-columns:([^;}]+)", style)
    assert len(columns) >= 5 and all("minmax(0,1fr)" in one and "1fr" not in one.replace("minmax(0,1fr)", "") for one in columns), columns
