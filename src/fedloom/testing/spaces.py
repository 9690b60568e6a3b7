"""What every search space promises. Tests that need weights are in the contracts of its supernet."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest

from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidArchitecture
from fedloom.core.registry import Entry
from fedloom.core.seeds import rng
from fedloom.spaces.base import SPACES, ImageShape, SearchSpace
from fedloom.supernets.base import SUPERNETS, Supernet, make_supernet
from fedloom.testing.nets import masks
from fedloom.testing.tiny import tiny_settings

DRAWS = 60


@dataclass(frozen=True)
class Instance:
    """A space and its supernet that can be made any time, also when the plugin that has them is gone."""

    space: Entry[Any]
    supernet: Entry[Any]
    settings: Any
    image: ImageShape

    def make(self) -> Supernet[Any]:
        made: Supernet[Any] = self.supernet.make(self.space.make(self.settings, self.image))
        return made


def instances(name: str, image: ImageShape) -> Iterator[tuple[str, Instance]]:
    """The tiny instance of a space, once for every value of each setting that chooses between names; with what tells them apart."""
    make_supernet(name, tiny := tiny_settings(SPACES[name].settings), image)  # refuses one without a supernet
    choices = [(item.name, value) for item in fields(tiny) for value in item.metadata.get("choices") or ()]
    for key, value in choices or [("", "")]:
        settings = replace(tiny, **{key: value}) if key else tiny
        yield f"{name} {value}".strip(), Instance(SPACES[name], SUPERNETS[name], settings, image)


def each(values: Sequence[Any], ids: Any = None) -> Any:
    """A fixture that takes these values in turn."""
    return pytest.fixture(params=values, ids=ids)(lambda self, request: request.param)


def supernets(cases: Sequence[Any]) -> Any:
    """The fixture of these contracts; a case is an Instance. Its tests share one supernet, as the clients of a run do."""

    def supernet(request: pytest.FixtureRequest) -> Supernet[Any]:
        made: Supernet[Any] = request.param.make()
        return made

    return pytest.fixture(scope="class", params=cases)(staticmethod(supernet))


needs_masks = pytest.mark.usefixtures("has_masks")


class Given:
    """What contracts of a space and its supernet are about. They need a fixture ``supernet``, such as ``supernets`` makes."""

    @pytest.fixture
    def space(self, supernet: Supernet[Any]) -> SearchSpace:
        space: SearchSpace = supernet.space
        return space

    @pytest.fixture
    def has_masks(self, supernet: Supernet[Any]) -> None:
        if not masks(supernet):
            pytest.skip("the supernet has no masked execution, which is optional")

    @staticmethod
    def trainable(space: SearchSpace, architecture: Architecture) -> Architecture:
        """One like this in which everything that has weights learns; spaces in which a layer can be cut off from its images say which."""
        return architecture


def some(space: SearchSpace, count: int = DRAWS) -> list[Architecture]:
    draw = rng("some")
    return [*space.named.values(), *(space.sample(draw) for _ in range(count))]


def with_choice(architecture: Architecture, gene: int, choice: int) -> Architecture:
    choices = list(architecture.choices)
    choices[gene] = choice
    return replace(architecture, choices=tuple(choices))


class SpaceContract(Given):
    """What follows from genes and costs."""

    def test_samples_are_valid_and_use_every_choice(self, space: SearchSpace) -> None:
        seen: list[set[int]] = [set() for _ in space.genes]
        for architecture in some(space, max(DRAWS, 12 * int(space.sizes.max()))):
            space.check(architecture)
            for gene, choice in enumerate(architecture.choices):
                assert type(choice) is int
                seen[gene].add(choice)
        assert [len(choices) for choices in seen] == [len(gene.values) for gene in space.genes]

    def test_mutants_are_valid_and_differ_from_their_parent(self, space: SearchSpace) -> None:
        draw = rng("mutate")
        for parent in some(space):
            for probability in (0.0, 0.1, 1.0):
                child = space.mutate(parent, draw, probability)
                space.check(child)
                assert child != parent

    def test_the_least_mutation_changes_one_gene(self, space: SearchSpace) -> None:
        draw = rng("least")
        for parent in some(space):
            child = space.mutate(parent, draw, 0.0)
            both = space.active(parent.choices) & space.active(child.choices)
            assert (np.array(parent.choices) != child.choices)[both].sum() == 1

    def test_genes_that_come_to_life_are_drawn_afresh(self, space: SearchSpace) -> None:
        draw = rng("alive")
        smallest = space.named["smallest"]
        asleep = ~space.active(smallest.choices) & (space.sizes > 1)
        if not asleep.any():
            pytest.skip("all genes are always active")
        children = [np.array(space.mutate(smallest, draw, 0.5).choices) for _ in range(DRAWS)]
        assert any(child[asleep].any() for child in children)

    def test_children_are_valid_and_inherit_active_genes(self, space: SearchSpace) -> None:
        draw = rng("crossover")
        parents = some(space)
        from_each = [0, 0]
        for first, second in zip(parents, reversed(parents), strict=True):
            child = space.crossover(first, second, draw)
            space.check(child)
            active = [space.active(parent.choices) for parent in (first, second)]
            for gene in np.flatnonzero(space.active(child.choices)):
                allowed = [parent.choices[gene] for parent, on in zip((first, second), active, strict=True) if on[gene]]
                assert child.choices[gene] in allowed
                if first.choices[gene] != second.choices[gene]:
                    from_each[child.choices[gene] == second.choices[gene]] += 1
        assert abs(from_each[0] - from_each[1]) < 5 * sum(from_each) ** 0.5  # five standard deviations of a fair coin

    def test_a_fair_draw_uses_every_choice_of_every_gene(self, space: SearchSpace) -> None:
        """FairNAS: exactly once where all genes have as many choices; genes may sleep where others switch their block off."""
        together = space.fair(rng("fair"))
        assert len(together) == space.sizes.max()
        for architecture in together:
            space.check(architecture)
        for gene, size in enumerate(space.sizes):
            awake = [a.choices[gene] for a in together if space.active(a.choices)[gene]]
            if len(awake) == len(together):
                assert set(awake) == set(range(size))
                assert size < len(together) or len(set(awake)) == len(awake)

    def test_a_child_of_equal_parents_is_like_them(self, space: SearchSpace) -> None:
        for parent in some(space, 10):
            assert space.crossover(parent, parent, rng("same")) == parent

    def test_a_child_has_the_share_of_its_first_parent_that_is_asked_for(self, space: SearchSpace) -> None:
        draw, parents = rng("share"), some(space)
        near, total = 0, 0
        for first, second in zip(parents, reversed(parents), strict=True):
            assert space.crossover(first, second, draw, 1) == first and space.crossover(first, second, draw, 0) == second
            child = space.crossover(first, second, draw, 0.2)
            space.check(child)
            both = space.active(first.choices) & space.active(second.choices) & space.active(child.choices)
            apart = [gene for gene in np.flatnonzero(both) if first.choices[gene] != second.choices[gene]]
            near, total = near + sum(child.choices[gene] == second.choices[gene] for gene in apart), total + len(apart)
        assert abs(near - 0.8 * total) < 5 * (0.16 * total) ** 0.5 + 1

    def test_decode_undoes_encode(self, space: SearchSpace) -> None:
        for architecture in some(space):
            code = space.encode(architecture)
            assert code.shape == (len(space.genes),)
            assert code.min() >= 0 and code.max() <= 1
            assert space.decode(code) == architecture
            assert space.decode(np.clip(code + rng("near").uniform(-0.1, 0.1, code.shape) / space.sizes, 0, 1)) == architecture

    def test_many_are_encoded_as_one_is(self, space: SearchSpace) -> None:
        several = some(space)
        assert np.array_equal(space.encode_many(several), np.stack([space.encode(one) for one in several]))
        assert space.encode_many([]).shape == (0, len(space.genes))

    def test_genes_without_effect_have_one_encoding(self, space: SearchSpace) -> None:
        for architecture in some(space):
            asleep = ~space.active(architecture.choices)
            assert not space.encode(architecture)[asleep].any()

    @pytest.mark.parametrize("kind", ["normal", "wide", "low", "high", "infinite", "no numbers"])
    def test_any_noise_decodes_to_something_valid(self, space: SearchSpace, kind: str) -> None:
        draw, genes = rng("noise", kind), len(space.genes)
        for _ in range(DRAWS):
            noise = {
                "normal": draw.normal(0.5, 0.5, genes),
                "wide": draw.normal(0, 1000, genes),
                "low": np.full(genes, -3.0),
                "high": np.full(genes, 3.0),
                "infinite": draw.choice([np.inf, -np.inf], genes),
                "no numbers": draw.choice([np.nan, 0.7], genes),
            }[kind]
            space.check(space.decode(noise))

    def test_canonical_is_idempotent_and_drops_idle_genes(self, space: SearchSpace) -> None:
        draw = rng("canonical")
        for _ in range(DRAWS):
            choices = draw.integers(space.sizes)
            once = space.canonical(choices)
            space.check(once)
            assert space.canonical(once.choices) == once
            active = space.active(choices)
            assert np.array_equal(np.array(once.choices)[active], choices[active])
            assert np.array_equal(space.active(once.choices), active)

    @pytest.mark.parametrize("name", ["smallest", "medium", "largest"])
    def test_bad_choices_are_refused_with_gene_and_allowed_values(self, space: SearchSpace, name: str) -> None:
        for index, gene in enumerate(space.genes):
            for choice in (-1, len(gene.values), 10**6):
                message = f"gene {index} ({gene.name}) must be 0..{len(gene.values) - 1}, got {choice}"
                with pytest.raises(InvalidArchitecture, match=re.escape(message)) as caught:
                    space.check(with_choice(space.named[name], index, choice))
                assert caught.value.facts["gene"] == index

    def test_idle_genes_must_be_zero(self, space: SearchSpace) -> None:
        smallest = space.named["smallest"]
        for index in np.flatnonzero(~space.active(smallest.choices) & (space.sizes > 1)).tolist():
            with pytest.raises(InvalidArchitecture, match=re.escape(f"gene {index} ({space.genes[index].name}) must be 0")):
                space.check(with_choice(smallest, index, 1))

    def test_other_spaces_and_lengths_are_refused(self, space: SearchSpace) -> None:
        smallest = space.named["smallest"]
        for wrong in (
            replace(smallest, space="other"),
            replace(smallest, choices=smallest.choices[:-1]),
            replace(smallest, choices=smallest.choices * 4),
        ):
            with pytest.raises(InvalidArchitecture, match=f"is not a {space.name} architecture of {len(space.genes)} genes"):
                space.check(wrong)

    def test_named_architectures_are_valid_and_in_order_of_cost(self, space: SearchSpace, supernet: Supernet[Any]) -> None:
        assert {"smallest", "medium", "largest"} <= set(space.named)
        for architecture in space.named.values():
            space.check(architecture)
        smallest, medium, largest = (space.cost(space.named[name]) for name in ("smallest", "medium", "largest"))
        assert smallest.parameters < medium.parameters < largest.parameters
        assert smallest.macs < medium.macs < largest.macs
        for architecture in [self.trainable(space, one) for one in some(space)]:
            cost = space.cost(architecture)
            assert smallest.parameters <= cost.parameters <= largest.parameters
            assert smallest.macs <= cost.macs <= largest.macs
            if masks(supernet):  # then all networks take the memory of the largest
                assert smallest.activations <= cost.activations <= largest.activations

    def test_the_generator_decides_everything(self, space: SearchSpace) -> None:
        def draws(seed: int) -> list[list[Architecture]]:
            draw = rng(seed)
            first, second = ([space.sample(draw) for _ in range(10)] for _ in range(2))
            mutants = [space.mutate(parent, draw) for parent in first]
            return [first, second, mutants, [space.crossover(*pair, draw) for pair in zip(first, second, strict=True)]]

        assert draws(1) == draws(1)
        assert all(one != other for one, other in zip(draws(1), draws(2), strict=True))

    def test_architectures_are_found_by_name_and_id(self, space: SearchSpace) -> None:
        for name, architecture in space.named.items():
            assert space.find(name, rng(0)) == architecture
            assert space.find(architecture.id, rng(0)) == architecture
        assert space.find("random", rng(5)) == space.sample(rng(5))
        with pytest.raises(InvalidArchitecture, match="Did you mean 'largest'"):
            space.find("largst", rng(0))
        with pytest.raises(InvalidArchitecture):
            space.find(f"{space.named['smallest'].id}-0", rng(0))

    def test_architectures_are_written_by_the_values_of_their_genes(self, space: SearchSpace) -> None:
        for architecture in some(space):
            values: list[Any] = [gene.shown[choice] for gene, choice in zip(space.genes, architecture.choices, strict=True)]
            assert space.from_values(values) == architecture
        for index, gene in enumerate(space.genes):
            with pytest.raises(InvalidArchitecture, match=re.escape(f"gene {index} ({gene.name}) must be one of ")):
                space.from_values([*values[:index], "no value", *values[index + 1 :]])
        with pytest.raises(InvalidArchitecture, match=f"has {len(space.genes)} genes, got {len(space.genes) - 1} values"):
            space.from_values(values[:-1])

    def test_there_are_at_least_as_many_architectures_as_drawn(self, space: SearchSpace) -> None:
        assert 1 < len(set(some(space))) <= space.architectures <= int(np.prod(space.sizes.astype(object)))

    def test_genes_have_names_of_their_own(self, space: SearchSpace) -> None:
        assert len({gene.name for gene in space.genes}) == len(space.genes)
        assert space.sizes.tolist() == [len(set(gene.values)) for gene in space.genes]

    def test_many_architectures_are_treated_like_one(self, space: SearchSpace) -> None:
        choices = rng("many").integers(space.sizes, size=(DRAWS, len(space.genes)))
        active, canonical = space.active_many(choices), space.canonical_many(choices)
        assert active.shape == canonical.shape == choices.shape and active.dtype == bool
        for row, awake, kept in zip(choices, active, canonical, strict=True):
            assert np.array_equal(space.active(row), awake)
            assert space.canonical(row) == Architecture(space.name, tuple(kept.tolist()))
        assert np.array_equal(canonical, np.where(active, choices, 0))
        none = choices[:0]
        assert space.active_many(none).shape == space.canonical_many(none).shape == space.sample_many(rng(0), 0).shape == none.shape

    def test_many_are_drawn_as_one_by_one(self, space: SearchSpace) -> None:
        draw = rng("stream")
        one_by_one = [space.sample(draw).choices for _ in range(DRAWS)]
        many = rng("stream")
        assert [*space.sample_many(many, DRAWS // 2).tolist(), *space.sample_many(many, DRAWS // 2).tolist()] == list(map(list, one_by_one))

    def test_many_draws_are_valid_and_uniform(self, space: SearchSpace) -> None:
        """Every choice of a gene equally often among the architectures in which it has an effect."""
        drawn = space.sample_many(rng("uniform"), 20_000)
        for row in drawn[:DRAWS]:
            space.check(Architecture(space.name, tuple(row.tolist())))
        active = space.active_many(drawn)
        assert np.array_equal(space.canonical_many(drawn), drawn)
        for gene, size in enumerate(space.sizes):
            awake = drawn[active[:, gene]]
            assert len(awake) > 500  # or the frequencies say nothing
            # Six standard deviations of a frequency.
            assert np.bincount(awake[:, gene], minlength=size) / len(awake) == pytest.approx(
                np.full(size, 1 / size), abs=3 / len(awake) ** 0.5
            )

    def test_what_follows_what_has_no_cycles(self, space: SearchSpace) -> None:
        genes = len(space.genes)
        assert space.follows.shape == (genes, genes) and space.follows.dtype == bool
        left = np.ones(genes, bool)
        while left.any():
            first = left & ~space.follows[left].any(axis=0)  # genes that follow none of those left
            assert first.any()
            left &= ~first

    def test_genes_have_a_place_in_the_network(self, space: SearchSpace) -> None:
        """What follows a gene does not lie before it, and genes of one place are followed by the same genes."""
        places = [(gene.stage, gene.place) for gene in space.genes]
        assert min(min(place) for place in places) >= 0
        for before, after in np.argwhere(space.follows):
            assert places[before] < places[after]
        followers = {place: space.follows[index] for index, place in enumerate(places)}
        for index, place in enumerate(places):
            assert np.array_equal(space.follows[index], followers[place])
