"""HAPFNAS: what the server learns without labels, who searches when, what travels, and how parts are averaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedloom.assemble import new_run, resume_run
from fedloom.assemble.builder import make_tools
from fedloom.config import Settings
from fedloom.core.architecture import Architecture
from fedloom.core.boundary import release
from fedloom.core.client_site import Examples
from fedloom.core.errors import BadReport, DamagedRun, InvalidConfig
from fedloom.core.messages import Instruction, Report, payload_bytes
from fedloom.core.seeds import rng
from fedloom.core.server_site import ServerImages
from fedloom.engine.run import Watcher
from fedloom.maths import averaging
from fedloom.maths.distillation import balanced_softmax, soft_cross_entropy
from fedloom.testing import Played
from fedloom.training.local import Trainer
from fedloom.training.tools import Tools

Tiny = Callable[..., Settings]
OWN = "method=hapfnas"


@pytest.fixture
def played(tiny: Tiny) -> Played:
    return Played(tiny(OWN))


def architecture_of(message: Instruction | Report) -> Architecture:
    return Architecture("mobilenetv3", tuple(message.arrays["architecture"]["choices"].tolist()))


def reported(played: Played, client: str, architecture: Architecture, change: float, examples: int) -> Report:
    """What a client would say whose training added ``change`` to every entry of its part."""
    part = played.method.tools.part_of(played.state.supernet, architecture)
    arrays = {
        "update": {name: np.full_like(array, change) for name, array in part.items()},
        "architecture": {"choices": np.array(architecture.choices, np.int32)},
    }
    return Report(client, played.state.round, arrays, {"examples": examples})


def searching(played: Played) -> Any:
    """The state after the supernet rounds."""
    return replace(played.state, round=played.method.supernet_rounds)


# -- phases -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rounds", "share", "expected"), [(10, 0.4, 4), (180, 0.667, 120), (2, 0.5, 1), (1, 0.667, 1), (10, 0.0, 1), (3, 1.0, 3)]
)
def test_the_supernet_gets_its_share_of_the_rounds(tiny: Tiny, rounds: int, share: float, expected: int) -> None:
    method = Played(tiny(OWN, f"rounds={rounds}", f"hapfnas.supernet_share={share}")).method
    assert method.supernet_rounds == expected


def test_everybody_gets_what_the_phase_needs_and_late_comers_search_when_first_drawn(tiny: Tiny) -> None:
    played = Played(tiny(OWN, "rounds=6", "clients=8", "participants=2", "hapfnas.supernet_share=0.3"))
    searched: set[str] = set()
    late = 0
    for number in range(6):
        answers = played.round()
        for instruction, answer in zip(played.instructions[-2:], answers, strict=True):
            task, client = instruction.facts["task"], instruction.client
            assert task == ("knowledge" if number < 2 else "subnet" if client in searched else "search")
            assert (answer.diary.evaluated_architectures > 0) == (task == "search")
            assert answer.diary.notes["knowledge"] == (task == "knowledge")
            if task == "search":
                searched.add(client)
                late += number > 2
            if task == "subnet":
                assert architecture_of(answer.report) == architecture_of(instruction)
    assert late and set(played.state.architectures) == searched
    assert played.method.finished(played.state)
    absent = next(client for client in played.federation.names if client not in searched)
    for client, expected in ((absent, "search"), (min(searched), "subnet")):
        answer = played.farewell(client)
        assert played.instructions[-1].facts["task"] == expected and answer.model is not None
        assert (answer.diary.evaluated_architectures > 0) == (expected == "search")


def test_rates_fall_once_in_each_phase(tiny: Tiny) -> None:
    method = Played(tiny(OWN, "rounds=4", "training.rate=0.4", "training.epochs=1")).method
    rates = [method._rates(number, knowledge=number < 2)[0] for number in range(4)]
    assert rates == pytest.approx([0.4, 0.2, 0.4, 0.2])


def test_clients_train_with_balanced_softmax_and_finish_with_cross_entropy(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    train = Trainer.train_networks

    def listen(self: Trainer, *more: Any) -> Any:
        losses.append(self.loss)
        return train(self, *more)

    monkeypatch.setattr(Trainer, "train_networks", listen)
    played.round()
    played.round()
    assert losses == [balanced_softmax] * 4
    played.farewell("client-000")
    assert losses[4:] and set(losses[4:]) == {F.cross_entropy}


# -- the server has no labels -----------------------------------------------------------------------
def test_the_servers_images_have_no_labels() -> None:
    assert [item.name for item in fields(ServerImages)] == ["images"]
    assert get_type_hints(Tools)["server"] == ServerImages | None
    assert get_type_hints(Trainer.distil)["images"] is ServerImages and not issubclass(ServerImages, Examples)


def test_what_the_server_learns_does_not_depend_on_labels(tiny: Tiny) -> None:
    """The same reports, at a server whose data set has all labels wrong."""
    settings = tiny(OWN)
    played = Played(settings)
    reports = [played.answer(instruction).report for instruction in played.method.plan(played.state, played.federation.names)]
    dataset = played.federation.dataset
    wrong = replace(dataset, train=replace(dataset.train, labels=np.zeros_like(dataset.train.labels)))
    other = replace(played.method, tools=make_tools(settings, wrong, torch.device("cpu")))
    one, two = (method.absorb(played.state, reports) for method in (played.method, other))
    assert all(np.array_equal(one.supernet[name], two.supernet[name]) for name in one.supernet)
    assert any(not np.array_equal(one.supernet[name], played.state.supernet[name]) for name in one.supernet)


def test_it_does_not_start_without_images(tiny: Tiny) -> None:
    for share in ("0", "0.0001"):
        with pytest.raises(InvalidConfig, match=r"images that the server holds, and it has none\. Set split\.server=0\.1"):
            Played(tiny(OWN, f"split.server={share}"))


# -- distillation --------------------------------------------------------------------------------------
def test_knowledge_models_are_averaged_by_examples_apart_from_the_supernet(played: Played) -> None:
    instructions = played.method.plan(played.state, played.federation.names)
    reports = []
    for instruction, change, examples in zip(instructions, (1.0, 5.0), (30, 10), strict=True):
        update = {name: np.full_like(array, change) for name, array in instruction.arrays["weights"].items()}
        arrays = {"update": update, "architecture": instruction.arrays["architecture"]}
        reports.append(Report(instruction.client, 0, arrays, {"examples": examples}))
    after = played.method.absorb(played.state, reports)
    for name, before in played.state.knowledge.items():
        assert after.knowledge[name] - before == pytest.approx(np.full(before.shape, 2.0), abs=1e-5)
    assert {client: int(count) for client, count in after.examples.items()} == {reports[0].client: 30, reports[1].client: 10}
    assert not after.architectures


def test_the_teacher_is_the_mean_of_the_models_logits_weighted_by_examples(played: Played) -> None:
    tools, smallest = played.method.tools, played.method.tools.space.named["smallest"]
    models = [tools.initial_network(seed, smallest) for seed in (1, 2)]
    images = tools.pixels.normalise(tools.server.images[:5])
    logits = []
    for model in models:
        weights = tools.tensors(model)
        logits.append(tools.supernet.forward(images, weights, smallest, tools.scorer.calibrate(weights, smallest, tools.server)))
    teacher = tools.scorer.ensemble([tools.tensors(model) for model in models], smallest, tools.server, [30, 10])
    expected = (30 * logits[0] + 10 * logits[1]) / 40
    assert torch.allclose(teacher(images), expected, atol=1e-5)


def test_a_step_teaches_the_largest_by_the_teacher_and_the_others_by_the_largest(tiny: Tiny) -> None:
    """One step without momentum and decay, against one gradient of the whole supernet."""
    tools = Played(tiny(OWN, "training.batch=16", "training.weight_decay=0", "training.crop=0")).method.tools
    space, supernet = tools.space, tools.supernet
    drawn = [space.named["largest"], space.named["smallest"], space.sample(rng("some"))]
    images = ServerImages(tools.server.images[:16])
    lesson = torch.randn(16, 10, generator=torch.Generator().manual_seed(1))
    # The order of images is the trainer's; a teacher that says the same of all makes it irrelevant.
    lesson = lesson[:1].expand(16, 10)
    weights = supernet.initial(4)
    moved = tools.trainer.distil(weights, lambda pixels: lesson[: len(pixels)], lambda draw: drawn, images, [0.3], rng(0))
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    pixels = tools.pixels.normalise(images.images)
    said = [supernet.forward(pixels, supernet.take(leaves, one), one) for one in drawn]
    loss = soft_cross_entropy(said[0], lesson) + sum(soft_cross_entropy(one, said[0].detach()) for one in said[1:])
    gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    for (name, before), gradient in zip(weights.items(), gradients, strict=True):
        assert torch.allclose(moved[name], before - 0.3 * gradient, atol=1e-4), name


def test_subnets_come_to_say_what_the_teacher_says(tiny: Tiny) -> None:
    """One that never met the teacher too: it learns from the largest."""
    tools = Played(tiny(OWN, "training.batch=16", "training.crop=0", "split.server=0.045")).method.tools
    named, supernet = tools.space.named, tools.supernet
    matrix = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))

    def teacher(pixels: torch.Tensor) -> torch.Tensor:
        return pixels.flatten(1) @ matrix

    def apart(weights: Any, name: str) -> float:
        pixels = tools.pixels.normalise(tools.server.images)
        logits = supernet.forward(pixels, supernet.take(weights, named[name]), named[name])
        return float(soft_cross_entropy(logits, teacher(pixels)))

    before = supernet.initial(0)
    after = tools.trainer.distil(before, teacher, lambda draw: [named["largest"], named["smallest"]], tools.server, [0.1] * 12, rng(0))
    assert all(apart(after, name) < apart(before, name) - 0.2 for name in ("largest", "smallest"))


def test_a_supernet_that_diverges_is_noticed_at_once(tiny: Tiny) -> None:
    with pytest.raises(InvalidConfig, match=r"The supernet diverged after round 0\. Lower hapfnas\.distil_rate"):
        Played(tiny(OWN, "hapfnas.distil_rate=1e30")).round()


def test_the_sandwich(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(tiny(OWN, "hapfnas.random_subnets=3"))
    drawn: list[list[Architecture]] = []

    def listen(self: Trainer, weights: Any, teacher: Any, draw: Any, *more: Any) -> Any:
        drawn.extend(draw(rng(number)) for number in range(3))
        return weights

    monkeypatch.setattr(Trainer, "distil", listen)
    played.round()
    named = played.method.tools.space.named
    assert all(step[:2] == [named["largest"], named["smallest"]] and len(step) == 5 for step in drawn)
    assert len({one for step in drawn for one in step[2:]}) == 9


# -- budgets ----------------------------------------------------------------------------------------------
def test_a_budget_rises_with_data_from_the_smallest_network_to_the_largest(played: Played) -> None:
    method, space = played.method, played.method.tools.space
    least, most = (space.cost(space.named[name]).macs for name in ("smallest", "largest"))
    limits = [method.allowed(examples, 20, 60).limits[0].most for examples in range(10, 71)]
    assert limits == sorted(limits) and limits[0] == least and limits[-1] == most
    assert sorted(set(limits)) == pytest.approx([least + step / 4 * (most - least) for step in range(5)])
    assert method.allowed(40, 20, 60).limits[0].most == (least + most) / 2
    assert method.allowed(12, 12, 12).limits[0].most == most  # all the same: no reason to give anybody less


def test_a_budget_that_is_set_takes_its_place(tiny: Tiny, played: Played) -> None:
    space = played.method.tools.space
    limit = sum(space.cost(space.named[name]).macs for name in ("smallest", "medium")) / 2
    bounded = Played(tiny(OWN, f"budget.macs={limit}"))
    assert {bounded.method.allowed(examples, 20, 60).limits[0].most for examples in (20, 60)} == {limit}
    bounded.round()
    for answer in [*bounded.round(), *map(bounded.farewell, bounded.federation.names)]:
        assert space.cost(Architecture.parse(answer.diary.architecture)).macs <= limit


def test_tiers_may_have_limits_of_their_own(tiny: Tiny, played: Played) -> None:
    space = played.method.tools.space
    least, middle = (space.cost(space.named[name]).macs for name in ("smallest", "medium"))
    tiers = "hardware.gmacs=[10, 100]"
    own = Played(tiny(OWN, f"hapfnas.macs=[{least}, {middle}]", tiers))
    assert [own.method.allowed(30, 20, 60, tier).limits[0].most for tier in (0, 1)] == [least, middle]
    for limits, also in ((2, ()), (3, (tiers,))):
        with pytest.raises(InvalidConfig, match=rf"hapfnas.macs has {limits} limits where there are {limits - 1} tiers"):
            tiny(OWN, f"hapfnas.macs={[middle] * limits}", *also)
    with pytest.raises(InvalidConfig, match=r"hapfnas.macs and budget.\* both limit what clients may have. Set one of them"):
        Played(tiny(OWN, f"hapfnas.macs=[{middle}]", f"budget.macs={middle}"))
    same = Played(tiny(OWN, f"hapfnas.macs=[{middle}]")).method
    assert {same.allowed(30, 20, 60, tier).limits[0].most for tier in range(3)} == {middle}
    with pytest.raises(InvalidConfig, match=r"hapfnas.macs \(.*\) is too little for mobilenetv3"):
        Played(tiny(OWN, f"hapfnas.macs=[{middle}, {least - 1}]", tiers))


def test_what_a_client_finds_keeps_its_budget(tiny: Tiny) -> None:
    """Clients of different sizes; the note says what each was allowed."""
    for seed in range(2):
        split = ("split.rule=label", "split.alpha=0.5", "split.minimum=10", "clients=6", "participants=6", "training.batch=100")
        played = Played(tiny(OWN, f"seed={seed}", "hapfnas.generations=3", *split))
        played.round()
        space, allowed = played.method.tools.space, set()
        for answer in played.round():
            allowed.add(answer.diary.notes["macs_limit"])
            assert space.cost(architecture_of(answer.report)).macs <= answer.diary.notes["macs_limit"]
        assert len(allowed) > 2 and space.cost(space.named["smallest"]).macs in allowed


def test_every_architecture_that_is_scored_takes_time(tiny: Tiny) -> None:
    played = Played(tiny(OWN))
    tools, site = played.method.tools, played.site("client-000")
    supernet, within = tools.tensors(played.method.supernet_of(played.state)), played.method.allowed(10, 5, 20)
    found = played.method._search(within, site, supernet, rng(0))
    images = len(site.data.validation) + min(tools.training.calibration, len(site.data.train))
    few, many = (found.scored * images * tools.space.cost(tools.space.named[size]).macs for size in ("smallest", "largest"))
    assert found.scored > 1 and few <= site.work.scored_macs <= many


# -- heteroFedAvg -----------------------------------------------------------------------------------------
def test_on_equal_networks_it_is_fedavg(played: Played) -> None:
    tools, state = played.method.tools, searching(played)
    architecture = tools.space.named["medium"]
    draw = rng("updates")
    reports = [reported(played, client, architecture, 0.0, examples) for client, examples in (("client-000", 30), ("client-001", 10))]
    for report in reports:
        for array in report.arrays["update"].values():
            array[...] = draw.standard_normal(array.shape)
    after = played.method.absorb(state, reports)
    mean = averaging.fedavg([report.arrays["update"] for report in reports], [], [30, 10])
    for name, region in tools.supernet.regions(architecture).items():
        assert after.supernet[name][region] == pytest.approx(state.supernet[name][region] + mean[name], abs=1e-6)


def test_entries_are_averaged_over_those_who_have_them_by_examples(played: Played) -> None:
    supernet, state = played.method.tools.supernet, searching(played)
    space = played.method.tools.space
    held = [space.sample(rng("held", number)) for number in range(2)]
    reports = [reported(played, "client-000", held[0], 1.0, 30), reported(played, "client-001", held[1], 5.0, 10)]
    after = played.method.absorb(state, reports)
    seen: set[float] = set()
    for name, before in state.supernet.items():
        has = [np.zeros(before.shape, bool) for _ in held]
        for mask, architecture in zip(has, held, strict=True):
            if name in supernet.regions(architecture):
                mask[supernet.regions(architecture)[name]] = True
        expected = np.select([has[0] & has[1], has[0], has[1]], [2.0, 1.0, 5.0], 0.0)  # (30 * 1 + 10 * 5) / 40
        assert after.supernet[name] - before == pytest.approx(expected, abs=1e-5)
        assert np.array_equal(after.supernet[name][expected == 0], before[expected == 0])  # not 0, as in the authors' code
        seen |= {float(value) for value in np.unique(expected)}
    assert seen == {0.0, 1.0, 2.0, 5.0}
    assert {client: tuple(own.tolist()) for client, own in after.architectures.items()} == {
        "client-000": held[0].choices,
        "client-001": held[1].choices,
    }


@pytest.mark.parametrize("phase", [0, 1])
def test_a_report_that_does_not_belong_to_its_network_is_refused(played: Played, phase: int) -> None:
    played.state = replace(played.state, round=phase)
    tools, (first, *_) = played.method.tools, played.method.plan(played.state, played.federation.names)
    good = played.answer(first).report
    name = max(good.arrays["update"], key=lambda name: good.arrays["update"][name].size)
    smaller = {**good.arrays["update"], name: good.arrays["update"][name][:1]}
    fewer = {key: array for key, array in good.arrays["update"].items() if key != name}
    wrong = [replace(good, arrays={**good.arrays, "update": update}) for update in (smaller, fewer)]
    if phase:
        choices = good.arrays["architecture"]["choices"] + 100
        wrong.append(replace(good, arrays={**good.arrays, "architecture": {"choices": choices}}))
    for report in wrong:
        assert release(report, first, played.method.uploads)  # a part, as far as the door can tell
        with pytest.raises(BadReport):
            played.method.absorb(played.state, [report])
    tools.space.check(architecture_of(good))
    assert played.method.absorb(played.state, [good]).round == phase + 1


# -- what travels ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("space", ["mobilenetv3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("darts", "nasvit"))])
def test_bytes_are_those_of_the_network_in_question(tiny: Tiny, space: str) -> None:
    """The knowledge model both ways; the supernet down and a subnet up; a subnet both ways; a plain network down."""
    played = Played(tiny(OWN, f"space={space}", "rounds=3", "participants=3", "hapfnas.supernet_share=0.34"))
    tools = played.method.tools
    genes = 4 * len(tools.space.genes)

    def part(architecture: Architecture) -> int:
        return 4 * sum(array.size for array in tools.part_of(played.state.supernet, architecture).values())

    def plain(architecture: Architecture) -> int:
        return 4 * sum(tensor.numel() for tensor in tools.supernet.plain(tools.tensors(played.state.supernet), architecture).values())

    whole = 4 * sum(array.size for array in played.state.supernet.values())
    for task in ("knowledge", "search", "subnet"):
        answers = played.round()
        for instruction, answer in zip(played.instructions[-3:], answers, strict=True):
            assert instruction.facts["task"] == task
            own = Architecture(space, tuple(answer.report.arrays["architecture"]["choices"].tolist()))
            if task == "knowledge":
                assert own == tools.space.named["smallest"]
            down = {"knowledge": plain(own), "search": whole, "subnet": part(own)}[task]
            up = plain(own) if task == "knowledge" else part(own)
            assert payload_bytes(instruction) == down + genes + len(json.dumps(dict(instruction.facts)))
            released = release(answer.report, instruction, played.method.uploads)
            assert released.bytes == up + genes + len(json.dumps({"examples": answer.report.facts["examples"]}))
            assert set(instruction.facts) == ({"task", "fewest", "most"} if task == "search" else {"task"})
    for client in played.federation.names:
        answer = played.farewell(client)
        own = Architecture.parse(answer.diary.architecture)
        assert payload_bytes(played.instructions[-1]) == plain(own) + genes + len('{"task": "subnet"}')
        assert payload_bytes(answer.report) == 0


def test_a_subnet_that_is_sent_is_the_clients_own_slice(tiny: Tiny) -> None:
    played = Played(tiny(OWN, "rounds=3", "participants=3", "hapfnas.supernet_share=0.34"))
    played.round()
    found = {answer.report.client: architecture_of(answer.report) for answer in played.round()}
    for instruction in played.method.plan(played.state, played.federation.names):
        assert architecture_of(instruction) == found[instruction.client]
        regions = played.method.tools.supernet.regions(found[instruction.client])
        sent = instruction.arrays["weights"]
        assert set(sent) == set(regions)
        assert all(np.array_equal(sent[name], played.state.supernet[name][region]) for name, region in regions.items())


# -- the run folder ----------------------------------------------------------------------------------------
def test_a_run_whose_server_would_have_clients_images_is_not_resumed(tiny: Tiny, nobody: Watcher, tmp_path: Path) -> None:
    new_run(tiny(OWN), tmp_path / "run", nobody)
    assert resume_run(tmp_path / "run", nobody).finished
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("server = 0.02", "server = 0.5"))
    with pytest.raises(DamagedRun, match=r"clients hold images that are the server's by split\.server and seed"):
        resume_run(tmp_path / "run", nobody)
