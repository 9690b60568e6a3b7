"""The five questions that a page answers first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedloom.core.result import mean_and_std
from fedloom.maths.paired import PairedDifference, paired_difference
from fedloom.report.charts.clients import gains, no_clients
from fedloom.report.page.blocks import missing
from fedloom.report.page.html import Html, joined, tag, ticked
from fedloom.report.view import BASELINES, Baseline, RunView
from fedloom.report.words import AT_SITES, TIGHT, byte_count, count, difference_words, duration, listed, many, percent, plain, points

NOTICED = 5e-4  # a difference of accuracy that is shown as one


@dataclass(frozen=True)
class Answer:
    section: str  # where there is more about it
    question: str
    short: str
    long: str
    beside: str = ""  # a second short answer


def answers(run: RunView, baselines: Sequence[Baseline]) -> list[Answer]:
    return [_helped(run, baselines), _failed(run, baselines), _got(run), _paid(run), _left(run)]


def answers_block(answers: Sequence[Answer]) -> Html:
    rows = []
    for answer in answers:
        question = tag("a", answer.question, href=f"#{answer.section}")
        rows.append(
            tag(
                "div",
                tag("h3", question),
                tag("div", tag("p", answer.short, class_="big"), tag("p", answer.beside) if answer.beside else None),
                tag("p", ticked(answer.long)),
                class_="answer",
            )
        )
    return tag("section", tag("h2", "In short", id="short-title", class_="quiet"), *rows, id="short", aria_labelledby="short-title")


def difference(run: RunView, baseline: Baseline) -> PairedDifference | None:
    own = gains(run, baseline)
    if not own:
        return None
    return paired_difference([baseline.accuracies[name] for name in own], [baseline.accuracies[name] + gain for name, gain in own.items()])


def _helped(run: RunView, baselines: Sequence[Baseline]) -> Answer:
    question = "Did it help?"
    if run.mean is None and run.finished:
        return Answer("help", question, "known at the sites", AT_SITES)
    if run.mean is None:
        return Answer("help", question, "not yet", f"The run is {run.spoken_state}. Its accuracy is known when it is finished.")
    against = [(baseline, found) for baseline in baselines if (found := difference(run, baseline)) is not None]
    parts = []
    for baseline, found in against:
        better = sum(gain > NOTICED for gain in gains(run, baseline).values())
        sure = "" if found.low is None or found.high is None else f" (95 % interval {points(found.low)} to {points(found.high)})"
        parts.append(f"{points(found.mean)} points against {baseline.method}{sure}, {better} of {many(found.pairs, 'client')} better")
    _, std = run.mean_and_std
    spread = f"± {percent(std)} over {many(len(run.clients), 'client')}"
    if parts:
        said = f"Mean test accuracy, {spread}: {'; '.join(parts)}."
    elif run.method in BASELINES:
        said = f"Mean test accuracy, {spread}. {run.method} is what other methods are compared with."
    else:
        said = f"Mean test accuracy, {spread}. Whether that helped cannot be said without a run of local and fedavg on the same split."
    beside = ", ".join(f"{points(found.mean)} on {baseline.method}" for baseline, found in against)
    return Answer("help", question, percent(run.mean), said, beside)


def _failed(run: RunView, baselines: Sequence[Baseline]) -> Answer:
    question = "Whom did it fail?"
    if not run.clients:
        return Answer("clients", question, *(("known at the sites", AT_SITES) if run.finished else ("not known yet", no_clients(run))))
    worst = run.by_accuracy[-1]
    said = f"{plain(worst.name)} has the lowest accuracy, {percent(worst.test_accuracy)} of {many(worst.test_examples, 'test image')}."
    local = next((baseline for baseline in baselines if baseline.method == "local"), None)
    if local is None:
        said += " Only a run of local can say who would have been better off alone."
        return Answer("clients", question, plain(worst.name, 24), said)
    own = sorted(gains(run, local).items(), key=lambda item: item[1])
    lost = [f"{plain(name)} ({points(gain)})" for name, gain in own if gain < -NOTICED]
    short = f"{len(lost)} of {many(len(own), 'client')}" if lost else "nobody"
    more = f" Worse off than alone: {listed(lost)}." if lost else " No client is worse off than by training alone."
    return Answer("clients", question, short, said + more)


def _got(run: RunView) -> Answer:
    question = "What did each client get?"
    if not run.clients:
        if run.finished:
            return Answer("architectures", question, many(len(run.course.totals.final), "personal model"), AT_SITES)
        return Answer("architectures", question, "nothing yet", "Personal models come with the final participation.")
    kinds = len({client.architecture for client in run.clients})
    sizes = sorted(client.parameters for client in run.clients)
    macs = sorted(client.macs for client in run.clients)
    numbers = f"{_range(sizes)} parameters and {_range(macs)} multiply-accumulates per image"
    if kinds == 1:
        short = "one architecture"
        said = f"All clients have the same network, each with its own weights: {numbers}."
    else:
        short = many(kinds, "architecture")
        said = f"{many(len(run.clients), 'client')} have networks of {numbers}."
    return Answer("architectures", question, short, said)


def _range(values: Sequence[int]) -> str:
    low, high = count(values[0]), count(values[-1])
    if low == high:
        return low
    number, _, unit = low.partition(TIGHT)
    return f"{number if unit and high.endswith(unit) else low} to {high}"


def _paid(run: RunView) -> Answer:
    totals = run.course.totals
    each = totals.bytes_up / max(run.course.reports, 1)
    sent = f"{byte_count(each)} up per client and round, {byte_count(totals.bytes_up)} in all" if totals.bytes_up else "nothing sent up"
    device = plain(run.environment.get("device", "an unknown device"), 40)
    said = (
        f"On {device}: {sent}, {byte_count(totals.bytes_down)} down; {count(totals.trained_macs)} multiply-accumulates trained; "
        f"{many(totals.evaluated_architectures, 'architecture')} scored; at most {totals.peak_memory_mb:.1f} MB for a training step."
    )
    return Answer("cost", "What did it cost?", duration(run.seconds) if run.seconds else "not known yet", said)


def _left(run: RunView) -> Answer:
    question, fields = "What left the building?", sorted(run.course.totals.uploads)
    if not fields:
        waiting = "" if run.finished else " so far"
        said = f"No report carried anything{waiting}. Images, labels, models and scores stayed with their clients."
        return Answer("privacy", question, "nothing", said)
    each = byte_count(run.course.totals.bytes_up / max(run.course.reports, 1))
    said = f"{each} in a report, {many(run.course.reports, 'report')}. Everything else stayed with its client: "
    said += "images, labels, the personal model and whatever no field names."
    return Answer("privacy", question, listed([plain(name, 24) for name in fields]), said)


def help_table(run: RunView, baselines: Sequence[Baseline]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Columns and rows of this run against its baselines."""
    mean, std = run.mean_and_std
    worst = run.by_accuracy[-1].test_accuracy if run.clients else None
    cost = (duration(run.seconds), byte_count(run.course.totals.bytes_up))
    rows = [(f"{run.method} (this run)", f"{percent(mean)} ± {percent(std)}", percent(worst), *difference_words(None), "–", *cost)]
    for baseline in baselines:
        values = list(baseline.accuracies.values())
        mean, std = mean_and_std(values)
        own = gains(run, baseline)
        better = f"{sum(gain > NOTICED for gain in own.values())} of {len(own)}" if own else "–"
        words, cost = difference_words(difference(run, baseline)), (duration(baseline.seconds), byte_count(baseline.bytes_up))
        rows.append((baseline.method, f"{percent(mean)} ± {percent(std)}", percent(min(values)), *words, better, *cost))
    columns = (
        "method",
        "test accuracy",
        "lowest client",
        "this run is ahead by, points",
        "95 % interval",
        "p",
        "clients better off here",
        "time",
        "sent up",
    )
    return columns, tuple(rows)


def baseline_remarks(run: RunView, baselines: Sequence[Baseline]) -> Html:
    remarks, place = [], run.folder.rstrip("/")
    for baseline in baselines:
        said = f"{baseline.method} is the run in {plain(baseline.folder, 200)}."
        if baseline.others:
            said += f" {many(baseline.others, 'other run')} of it would fit as well."
        if baseline.differs:
            said += f" It differs from this run in {listed([plain(text, 90) for text in baseline.differs], 6)}."
        remarks.append(tag("li", said))
    lacking = [method for method in BASELINES if method != run.method and method not in {baseline.method for baseline in baselines}]
    for method in [] if run.federation else lacking:
        why = f"There is no finished run of {method} on the same split and seed beside this one. "
        make = f"fedloom run {place}/config.toml method={method} run.folder={place}-{method}"
        remarks.append(missing(f"{why}Make it with `{make}`, then report again.", "li"))
    return tag("ul", *remarks, class_="remarks") if remarks else joined()
