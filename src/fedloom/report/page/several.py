"""The page that sets several runs side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter

import numpy as np

from fedloom.maths.paired import PairedDifference
from fedloom.report.charts import comparison as charts
from fedloom.report.charts.comparison import BYTES_UP, SECONDS, Group
from fedloom.report.figure import Axis, Figure, Numbers
from fedloom.report.page.answers import NOTICED, Answer, answers_block
from fedloom.report.page.blocks import Section, beside, document, figure_block, gallery, missing, numbers_table
from fedloom.report.page.html import Html, joined, tag
from fedloom.report.page.provenance import COMMON, shown
from fedloom.report.page.published import published_block
from fedloom.report.view import RunView
from fedloom.report.words import byte_count, count, difference_words, duration, listed, many, percent, plain, points


def comparison_page(runs: Sequence[RunView]) -> str:
    groups = charts.groups_of(runs)
    seeds = sorted({run.seed for run in runs})
    kind = "method" if groups[0].name == runs[0].method else "run"
    names = f"{many(len(groups), kind)} on {listed(list(dict.fromkeys(run.dataset for run in runs)))}"
    many_seeds = f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds"
    about = f"{many(runs[0].client_count, 'client')}, {many_seeds}: {listed([group.name for group in groups], 8)}"
    header = joined(tag("p", "Fedloom comparison", class_="overline"), tag("h1", names), tag("p", about, class_="sub"))
    return document(f"{names}: Fedloom comparison", header, _answers(groups), comparison_sections(groups))


def comparison_figures(runs: Sequence[RunView]) -> list[Figure]:
    return [one for section in comparison_sections(charts.groups_of(runs)) for one in section.figures if isinstance(one, Figure)]


def comparison_sections(groups: Sequence[Group]) -> list[Section]:
    return [_help(groups), _clients(groups), _cost(groups), _privacy(groups), _settings(groups), _made(groups)]


def _answers(groups: Sequence[Group]) -> Html:
    whole = [group for group in groups if group.finished]
    answers = []
    if not whole:
        answers.append(Answer("help", "Which is best?", "not known yet", "None of these runs is finished."))
    else:
        said = [f"{name} {points(found.mean)} points{_interval(found)}" for name, found in charts.differences(groups).items()]
        long = f"Mean test accuracy over clients: {listed([f'{group.name} {percent(group.mean)}' for group in whole], 8)}."
        long += f" Paired, against {charts.compared_to(groups)}: {listed(said, 8)}." if said else ""
        answers.append(Answer("help", "Which is best?", *_best(whole, long)))
        worst = {group.name: min(group.accuracies) for group in whole}
        fair = [name for name, value in worst.items() if max(worst.values()) - value < NOTICED]
        long = f"The lowest client: {listed([f'{name} {percent(value)}' for name, value in worst.items()], 8)}."
        for first, other in charts.compared(groups):
            found_pairs = charts.pairs(first, other)
            if found_pairs:
                lost = sum(before - after > NOTICED for before, after in found_pairs)
                long += f" {lost} of {len(found_pairs)} clients are better off under {first.name} than under {other.name}."
        answers.append(Answer("clients", "Whom does each fail?", f"least: {listed(fair)}", long))
        cheap = min(whole, key=lambda group: group.average(SECONDS))
        costs = [f"{group.name} {duration(group.average(SECONDS))} and {byte_count(group.average(BYTES_UP))} up" for group in whole]
        answers.append(Answer("cost", "What do they cost?", f"{cheap.name} is fastest", f"{listed(costs, 8)}."))
    left = [f"{group.name}: {listed(_uploads(group)) or 'nothing'}" for group in groups]
    quiet = min(groups, key=lambda group: sum(run.course.totals.bytes_up for run in group.runs) / len(group.runs))
    answers.append(Answer("privacy", "What left the building?", f"least under {quiet.name}", f"{'; '.join(left)}."))
    return answers_block(answers)


def _best(whole: Sequence[Group], long: str) -> tuple[str, str]:
    """The group with the highest mean; "best" only where its paired interval against every other is above 0."""
    best, *others = sorted(whole, key=lambda group: -group.mean)
    found = {other.name: charts.difference(other, best) for other in others if other.block == best.block}
    unclear = [name for name, one in found.items() if one is None or one.low is None or one.low <= 0]
    if not unclear:
        return f"{best.name}, {percent(best.mean)}", long
    paired = [f"{points(one.mean)} points on {name}{_interval(one)}" for name in unclear if (one := found[name]) is not None]
    ahead = f" {best.name} has the highest mean, but {listed(paired, 8)}" if paired else f" {best.name} has the highest mean"
    return f"not clear: {listed([best.name, *unclear])}", f"{long}{ahead}; these runs cannot tell them apart."


def _interval(found: PairedDifference) -> str:
    return "" if found.low is None or found.high is None else f" (95 % interval {points(found.low)} to {points(found.high)})"


def _uploads(group: Group) -> list[str]:
    return sorted({plain(name, 24) for run in group.runs for name in run.course.totals.uploads})


def _help(groups: Sequence[Group]) -> Section:
    figures = [
        charts.accuracy_strips(groups),
        charts.courses(groups),
        charts.course_against(groups, "work", Axis("time at clients", "seconds"), 1, attrgetter("worked")),
        charts.course_against(groups, "bytes", Axis("bytes sent up", "MB"), 1e6, attrgetter("bytes_up")),
    ]
    found, against = charts.differences(groups), charts.compared_to(groups)
    columns = (
        "run",
        "test accuracy",
        "± over clients",
        "± over seeds",
        "lowest client",
        "last participation",
        "best ever",
        f"against {against}, points",
        "95 % interval",
        "p, Holm",
        "time",
        "sent up",
    )
    rows = []
    for group in groups:
        if not group.finished:
            continue
        means = [run.mean or 0.0 for run in group.finished]
        over_clients = float(np.mean([run.mean_and_std[1] for run in group.finished]))
        over_seeds = percent(float(np.std(means, ddof=1))) if len(means) > 1 else "–"
        words = difference_words(found.get(group.name))
        cost = (duration(group.average(SECONDS)), byte_count(group.average(BYTES_UP)))
        others = [_mean_of(list(getattr(run.course.totals, kind).values()) for run in group.finished) for kind in ("latest", "best_ever")]
        own = (percent(group.mean), percent(over_clients), over_seeds, percent(min(group.accuracies)))
        rows.append((group.name, *own, *others, *words, *cost))
    blocks: list[Html] = [numbers_table(Numbers(columns, tuple(rows)), "All runs, means over seeds")] if rows else []
    blocks += [missing(f"{plain(run.folder, 200)} is {run.spoken_state}.") for group in groups for run in group.runs if not run.finished]
    apart = [group.name for first, group in charts.compared(groups) if group.finished and first.finished and group.name not in found]
    if apart:
        blocks.append(
            missing(f"{listed(apart)} has no run with the split and seed of {against}, so its clients cannot be paired with those.")
        )
    note = f"Differences are to {against}, paired by client, seed and split: 95 % Student t interval, p of Wilcoxon's signed-rank test, "
    note += f"corrected for {many(len(found), 'comparison')} (Holm). Last participation (of clients that took part) and best ever are test "
    note += "accuracies, means over clients, for comparison with papers that report them; they select nothing."
    blocks.append(tag("p", note, class_="small"))
    blocks.append(published_block([run for group in groups for run in group.runs]))
    return Section("help", "Which is best?", "Test accuracy of all personal models.", lambda: [*blocks, gallery(figures)], figures)


def _mean_of(runs: Iterable[list[float]]) -> str:
    """Of the runs' means over clients."""
    means = [float(np.mean(values)) for values in runs if values]
    return percent(float(np.mean(means))) if means else "–"


def _clients(groups: Sequence[Group]) -> Section:
    figure = charts.sorted_differences(groups) if len(groups) > 1 else None
    names = list(dict.fromkeys(client.name for group in groups for run in group.finished for client in run.clients))
    words = missing("None of these runs is finished.")
    if names:
        columns = ("client", *(f"{group.name}, seed {run.seed}" for group in groups for run in group.finished))
        known = [{client.name: client.test_accuracy for client in run.clients} for group in groups for run in group.finished]
        rows = tuple((plain(name), *(percent(accuracies.get(name)) for accuracies in known)) for name in sorted(names))
        words = numbers_table(Numbers(columns, rows), "Every client under every run")
    shown_figures = [figure] if figure else []
    lead = "The same client under one run and another."
    return Section(
        "clients", "Whom does each fail?", lead, lambda: [beside(words, figure_block(figure)) if figure else words], shown_figures
    )


def _cost(groups: Sequence[Group]) -> Section:
    figures = [*charts.cost_points(groups), charts.stages(groups)]
    columns = (
        "run",
        "time",
        "sent up",
        "sent down",
        "trained, MACs",
        "architectures scored",
        "largest training step",
        "parameters of a network, mean",
    )
    rows = []
    for group in groups:
        totals = [run.course.totals for run in group.runs]
        n = len(totals)
        sizes = [client.parameters for run in group.finished for client in run.clients]
        rows.append(
            (
                group.name,
                duration(sum(run.seconds for run in group.runs) / n),
                byte_count(sum(t.bytes_up for t in totals) / n),
                byte_count(sum(t.bytes_down for t in totals) / n),
                count(sum(t.trained_macs for t in totals) / n),
                count(sum(t.evaluated_architectures for t in totals) / n),
                f"{max(t.peak_memory_mb for t in totals):.1f} MB",
                count(float(np.mean(sizes))) if sizes else "–",
            )
        )
    table = numbers_table(Numbers(columns, tuple(rows)), "Costs, means over seeds")
    return Section(
        "cost", "What do they cost?", "As their ledgers have it.", lambda: [table, gallery(figures[:3]), gallery(figures[3:])], figures
    )


def _privacy(groups: Sequence[Group]) -> Section:
    rows = []
    for group in groups:
        run = group.runs[0]
        declared = dict(run.manifest or {})
        for name in [*declared, *sorted(run.course.totals.uploads - set(declared))]:
            size = run.course.up_by_field.get(name)
            each = byte_count(size / max(run.course.reports, 1)) if size is not None and not run.course.unnamed_up else "not recorded"
            rows.append((group.name, plain(name), plain(declared[name].meaning, 200) if name in declared else "–", each))
        if not declared and not run.course.totals.uploads:
            rows.append((group.name, "nothing", "–", byte_count(0)))
    table = numbers_table(Numbers(("run", "field", "what it is", "bytes per report, mean"), tuple(rows)), "What may leave a client")
    return Section("privacy", "What left the building?", "The fields that each method declares, and their bytes.", lambda: [table])


def _settings(groups: Sequence[Group]) -> Section:
    """Where the runs differ, but for the tables of methods that only one of them has."""
    runs = [(group.name, run) for group in groups for run in group.runs]
    methods = Counter(group.runs[0].method for group in groups)
    parts = {*COMMON, *(run.space_name for _, run in runs), *(method for method, times in methods.items() if times > 1)}
    keys = dict.fromkeys(key for _, run in runs for key in run.settings)
    rows = []
    for key in keys:
        table, dot, _ = key.partition(".")
        if key in ("run.folder", "seed", "method") or (dot and table not in parts):
            continue
        values = [shown(run.settings.get(key, "–")) for _, run in runs]
        if len(set(values)) > 1:
            rows.append((plain(key), *values))
    lead = "Settings that are not the same in all runs, besides method, seed, folder and what only one of the methods has: "
    lead += "if there are any, the comparison is not about methods alone."
    columns = ("setting", *(f"{name}, seed {run.seed}" for name, run in runs))
    block = (
        numbers_table(Numbers(columns, tuple(rows)), "Settings that differ")
        if rows
        else tag("p", "There are none: the runs differ in method, seed and settings that only one of the methods has.")
    )
    return Section("settings", "Is it fair?", lead, lambda: [block])


def _made(groups: Sequence[Group]) -> Section:
    rows = []
    for group in groups:
        for run in group.runs:
            versions = [plain(run.environment.get(name, "–"), 40) for name in ("commit", "fedloom", "torch", "device")]
            rows.append((group.name, str(run.seed), plain(run.folder, 200), run.spoken_state, *versions))
    columns = ("run", "seed", "folder", "state", "commit", "fedloom", "torch", "device")
    table = numbers_table(Numbers(columns, tuple(rows)), "All runs")
    lead = "Each is an ordinary run; `fedloom report FOLDER` makes its own page."
    return Section("made", "How were they made?", lead, lambda: [table])
