"""Test classes for plugins. Assign one to a name that begins with ``Test``, and pytest runs the contract.

A plugin is a file, by a path that starts at the folder of the test file, or an installed module.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedloom.methods.base import METHODS
from fedloom.plugins import full_name
from fedloom.search.base import SURROGATES
from fedloom.spaces.base import ImageShape
from fedloom.testing.executions import ExecutionContract
from fedloom.testing.masked import MaskedContract
from fedloom.testing.methods import MethodContract, played
from fedloom.testing.plugged import plugged
from fedloom.testing.prefixes import PrefixContract
from fedloom.testing.spaces import SpaceContract, instances, supernets
from fedloom.testing.stacks import StackContract
from fedloom.testing.supernets import SupernetContract
from fedloom.testing.surrogates import SurrogateContract, surrogates
from fedloom.testing.together import TogetherContract

IMAGE = ImageShape(channels=1, size=8, classes=3)


class WholeSpaceContract(SpaceContract, SupernetContract, MaskedContract, ExecutionContract, PrefixContract, StackContract):
    """A search space with its supernet."""


class WholeMethodContract(MethodContract, TogetherContract):
    """A method, alone and where clients answer together."""


def method_tests(plugin: str, name: str, *changes: str) -> type:
    """Tests of a method. changes: settings as on the command line; without ``space=…`` it is tested on its first search space."""
    file = _beside_the_test(plugin)
    with plugged(file):
        METHODS[name]  # refuses an unknown name
    case = pytest.param((file, f"method={name}", *changes), id=" ".join((name, *changes)))
    return type("TestMethod", (WholeMethodContract,), {"played": played([case])})


def space_tests(plugin: str, name: str, image: ImageShape = IMAGE) -> type:
    """Tests of a search space and its supernet on such images: ``tiny()`` of its settings, with each value of a setting with choices."""
    with plugged(_beside_the_test(plugin)):
        cases = [pytest.param(case, id=id) for id, case in instances(name, image)]
    return type("TestSpace", (WholeSpaceContract,), {"supernet": supernets(cases)})


def surrogate_tests(plugin: str, name: str) -> type:
    """Tests of a surrogate."""
    with plugged(_beside_the_test(plugin)):
        case = pytest.param(SURROGATES[name].make, id=name)
    return type("TestSurrogate", (SurrogateContract,), {"fit": surrogates([case])})


def _beside_the_test(plugin: str) -> str:
    """Whoever runs pytest may be anywhere; where the test file is, its globals say, as they do for collections.namedtuple."""
    return full_name(plugin, Path(sys._getframe(2).f_globals["__file__"]).parent)
