"""The page of one run."""

from __future__ import annotations

from collections.abc import Sequence

from fedloom.report.charts.clients import against_alone, against_images, client_bars, cost_figures, distribution, gains, no_clients
from fedloom.report.charts.costs import bytes_by_field, time_by_stage
from fedloom.report.charts.data import likeness_figures, split_map
from fedloom.report.charts.judged import judged_figures, judged_lead, judged_table
from fedloom.report.charts.rounds import accuracy_over_rounds, other_notes, search_figures
from fedloom.report.figure import Figure, Missing, Numbers, Shown
from fedloom.report.page.anchor import anchor_sections
from fedloom.report.page.answers import answers, answers_block, baseline_remarks, help_table
from fedloom.report.page.architectures import architectures_block
from fedloom.report.page.blocks import Section, beside, document, facts, figure_block, folded, gallery, missing, numbers_table
from fedloom.report.page.html import Html, joined, tag
from fedloom.report.page.privacy import privacy_blocks
from fedloom.report.page.provenance import provenance_blocks
from fedloom.report.page.published import published_block
from fedloom.report.view import Baseline, RunView
from fedloom.report.words import byte_count, count, duration, many, plain


def page(run: RunView, baselines: Sequence[Baseline]) -> str:
    sections = sections_of(run, baselines)
    absent = [shown for section in sections for shown in section.figures if isinstance(shown, Missing)]
    summary = joined(answers_block(answers(run, baselines)), _absent(absent))
    return document(f"{run.method} on {run.dataset}, {many(run.client_count, 'client')}: Fedloom report", _header(run), summary, sections)


def figures_of(run: RunView, baselines: Sequence[Baseline]) -> list[Figure]:
    """All that can be drawn of a run."""
    return [shown for section in sections_of(run, baselines) for shown in section.figures if isinstance(shown, Figure)]


def sections_of(run: RunView, baselines: Sequence[Baseline]) -> list[Section]:
    return [
        _help(run, baselines),
        _clients(run, baselines),
        *_judged(run),
        _data(run),
        _architectures(run, baselines),
        *anchor_sections(run, baselines),
        _search(run),
        _cost(run),
        _privacy(run),
        _made(run),
    ]


def _header(run: RunView) -> Html:
    kind = f"{many(run.client_count, 'client')}, {many(run.rounds, 'round')}, space {run.space_name}, seed {run.seed}"
    state = None if run.finished else tag("p", f"This run is {run.spoken_state}.", class_="missing")
    return joined(
        tag("p", "Fedloom report", class_="overline"),
        tag("h1", f"{run.method} on {run.dataset}"),
        tag("p", run.about, class_="sub") if run.about else None,
        tag("p", f"{kind}; {run.spoken_state}", class_="sub"),
        state,
    )


def _absent(absent: Sequence[Missing]) -> Html:
    if not absent:
        return joined()
    return tag(
        "p",
        tag("strong", "Not in this report: "),
        "; ".join(shown.title for shown in absent),
        ". Each says why in its place.",
        class_="small absent",
    )


def _help(run: RunView, baselines: Sequence[Baseline]) -> Section:
    figures = [accuracy_over_rounds(run, baselines), distribution(run, baselines)]
    table = (
        numbers_table(Numbers(*help_table(run, baselines)), "This run against its baselines") if run.clients else missing(no_clients(run))
    )
    notes = "Differences are paired by client: the 95 % Student t interval of their mean, and p of Wilcoxon's signed-rank test. "
    notes += "Clients of one run learn from each other, so both are too certain about another federation."
    small = tag("p", notes, class_="small") if baselines and run.clients else None
    lead = "This run against training alone (local) and against one shared network, fine-tuned (fedavg), on the same split and seed."
    remarks = baseline_remarks(run, baselines)
    published = published_block([run])
    return Section("help", "Did it help?", lead, lambda: [joined(table, small, remarks, published), gallery(figures)], figures)


def _clients(run: RunView, baselines: Sequence[Baseline]) -> Section:
    figures = [client_bars(run, baselines), against_alone(run, baselines)]
    lead = "Test accuracy of every client's personal model, best first, and what it gained over training alone."
    return Section("clients", "Whom did it fail?", lead, lambda: [gallery(figures)], figures)


def _judged(run: RunView) -> list[Section]:
    figures = judged_figures(run)
    if not figures:
        return []
    table = folded("Client by client", numbers_table(judged_table(run), "Personal models, by class and as probabilities"))
    return [Section("judged", "Which images does it get wrong?", judged_lead(run), lambda: [gallery(figures), table], figures)]


def _data(run: RunView) -> Section:
    figures = [split_map(run), against_images(run)]
    lead = "How the images are divided among the clients, and whether those with few are left behind."
    return Section("data", "Who holds what?", lead, lambda: [gallery(figures)], figures)


def _architectures(run: RunView, baselines: Sequence[Baseline]) -> Section:
    likeness = likeness_figures(run)
    local = next((baseline for baseline in baselines if baseline.method == "local"), None)
    gained = gains(run, local) if local else {}
    lead = "Each client's network, best client first: a row for each stage or cell, a bar for each block or edge, "
    lead += "its colour the operation, its height the width."
    return Section(
        "architectures", "What did each client get?", lead, lambda: [*architectures_block(run, gained), gallery(likeness)], likeness
    )


def _search(run: RunView) -> Section:
    figures = search_figures(run)
    notes = other_notes(run)
    more = folded("What else the method noted", numbers_table(notes, "Notes in the ledger, over participations")) if notes else joined()
    lead = "What clients measured while they searched. Only a simulation can show this: in a federation it stays at the client."
    return Section("search", "How did the search go?", lead, lambda: [gallery(figures), more], figures)


def _cost(run: RunView) -> Section:
    figures: list[Shown] = [time_by_stage(run), *cost_figures(run)]
    totals = run.course.totals
    rows: list[tuple[str, object]] = [
        ("wall time", duration(run.seconds) if run.seconds else "not known yet"),
        ("time that clients worked", duration(sum(totals.stages.values()))),
        ("participations", f"{run.course.participations:,} in rounds, {len(totals.final):,} final ones"),
        ("sent up", byte_count(totals.bytes_up)),
        ("sent down", byte_count(totals.bytes_down)),
        ("trained", f"{count(totals.trained_macs)} multiply-accumulates"),
        ("scored", many(totals.evaluated_architectures, "architecture")),
        ("largest training step", f"{totals.peak_memory_mb:.1f} MB, computed"),
    ]
    simulated = totals.simulated_seconds + totals.slowest
    chosen = any(key.startswith("hardware.") and run.defaults.get(key, (value,))[0] != value for key, value in run.settings.items())
    if simulated and chosen:
        rows.append(("on the simulated hardware", f"{duration(simulated)} for all rounds, {many(len(run.course.tiers), 'tier')}"))
    lead = "Time, memory, arithmetic and bytes, as the ledger has them."
    return Section(
        "cost", "What did it cost?", lead, lambda: [beside(facts(rows), figure_block(figures[0])), gallery(figures[1:])], figures
    )


def _privacy(run: RunView) -> Section:
    figure = bytes_by_field(run)
    table, words = privacy_blocks(run)
    lead = "The method declares every field that a report may carry. One function checks every report; nothing else can leave a client."
    return Section("privacy", "What left the building?", lead, lambda: [table, beside(words, figure_block(figure))], [figure])


def _made(run: RunView) -> Section:
    lead = f"Everything that is needed to repeat this run, which is in `{plain(run.folder, 300)}`."
    return Section("made", "How was it made?", lead, lambda: provenance_blocks(run))
