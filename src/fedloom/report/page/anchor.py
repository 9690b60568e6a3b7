"""What a search around an anchor brought: who left it, what those clients won, and how alike the networks are."""

from __future__ import annotations

from collections.abc import Sequence

from fedloom.report.anchor import Departures, Group, loss_change, selecting
from fedloom.report.charts.clients import gains
from fedloom.report.figure import Numbers
from fedloom.report.page.blocks import Section, facts, numbers_table
from fedloom.report.page.html import Html, tag, ticked
from fedloom.report.view import Baseline, RunView
from fedloom.report.words import listed, many, percent, plain, points

UNREACHABLE = 1e9  # standard errors that no loss is lower by
OTHERS = (
    "Those who left are other clients than those who stayed, with other data. So their test accuracies do not say what leaving brought."
)


def anchor_sections(run: RunView, baselines: Sequence[Baseline]) -> list[Section]:
    """One, or none: for a run whose ledger speaks of an anchor."""
    found = Departures.of(run.course.totals.final.values())
    if not found:
        return []
    name = plain(run.settings.get("perfedsde.anchor") or "one for all")
    lead = f"The anchor ({name}) is the network that every client trains. At the end each client kept it or left it for another."
    return [Section("anchor", "Did it pay to leave the anchor?", lead, lambda: _blocks(run, baselines, found))]


def _blocks(run: RunView, baselines: Sequence[Baseline], found: Departures) -> list[Html]:
    said = [found.counted + ". " + _won(run, found)]
    if found.left.clients and found.stayed.clients:
        said.append(OTHERS)
    if found.left.losses and run.settings.get("training.choice") == "evidence":  # without finalists, evidence keeps no anchor
        said.append(_check(run))
    if found.unknown:
        said.append(f"Not counted: {many(found.unknown, 'client')} whose final entry in the ledger does not speak of the anchor.")
    return [_table(run, baselines, found), *(tag("p", ticked(text)) for text in said), facts(_alike(run, found))]


def _won(run: RunView, found: Departures) -> str:
    left, images = found.left, selecting(run.protocol)
    if not left.clients:
        return "So everybody has the architecture of the anchor: the search changed no network."
    if not left.losses:
        return "What they won cannot be said: the ledger has no loss of the anchor to compare with what they kept."
    anchor, kept, _ = loss_change(left.losses)
    verb = "fell" if left.losses[1] < left.losses[0] else "did not fall"
    said = f"Their mean loss on {images} images {verb}: {anchor} with the anchor, {kept} with what they kept, "
    said += "both at the rate chosen for the anchor. "
    said += "The same images chose the network, so this is optimistic: on new images expect less."
    if left.without_losses:
        said += f" {left.without_losses} of those who left have no such pair of losses and are not in these means."
    if run.settings.get("training.rejoin"):
        said += " Both losses are from before the last training, which adds the validation images."
    return said


def _check(run: RunView) -> str:
    """How to measure it: rounds do not read training.evidence, so they are the same rounds."""
    place = run.folder.rstrip("/")
    rate = " and the first of the fine-tuning rates" if len(run.settings.get("training.finetune_rates", ())) > 1 else ""
    said = f"To measure it on test images, repeat the run so that everybody keeps the anchor{rate}: "
    return said + f"`fedloom run {place}/config.toml training.evidence={UNREACHABLE:g} run.folder={place}-stay`, then report both together."


def _table(run: RunView, baselines: Sequence[Baseline], found: Departures) -> Html:
    images = selecting(run.protocol)
    ahead = {baseline.method: gains(run, baseline) for baseline in baselines}
    groups = {"left the anchor": found.left, "stayed": found.stayed}
    groups = {name: group for name, group in groups.items() if group.clients}
    if len(groups) > 1:
        groups["all"] = found.everybody
    rows = []
    for name, group in groups.items():
        before_by = [points(_mean_of(own, group)) for own in ahead.values()]
        rows.append((name, str(len(group.clients)), *loss_change(group.losses), percent(group.test_accuracy), *before_by))
    columns = (
        "",
        "clients",
        f"{images} loss of the anchor",
        "of what was kept",
        "difference",
        "test accuracy",
        *(f"ahead of {method}, points" for method in ahead),
    )
    return numbers_table(Numbers(columns, tuple(rows)), "Those who left the anchor and those who stayed, means over clients")


def _mean_of(gained: dict[str, float], group: Group) -> float | None:
    known = [gained[client.name] for client in group.clients if client.name in gained]
    return sum(known) / len(known) if known else None


def _alike(run: RunView, found: Departures) -> list[tuple[str, object]]:
    everybody = found.everybody
    rows: list[tuple[str, object]] = [
        ("different architectures", f"{everybody.architectures:,} among {many(len(everybody.clients), 'client')}"),
        ("they differ from the anchor by", everybody.genes),
    ]
    if found.left.clients and found.stayed.clients:
        rows.append(("those who left, by", found.left.genes))
    if run.space is not None:
        rows.append(("genes that have a choice", sum(len(gene.values) > 1 for gene in run.space.genes)))
    rates = [f"{_rate(rate)} ({many(clients, 'client')})" for rate, clients in everybody.rates]
    return [*rows, ("fine-tuning rates that were kept", listed(rates, 8))]


def _rate(rate: float | None) -> str:
    return "not noted" if rate is None else f"{rate:g}" if rate else "untuned"
