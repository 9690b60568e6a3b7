"""Newcomers: a personal model after the rounds, by search alone in the supernet as it is. Nothing is sent."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from fedloom.core.client_site import ClientSite
from fedloom.core.errors import ClientFailed, InvalidConfig
from fedloom.core.machine import process_memory_mb
from fedloom.core.method import Method, State, is_per_client
from fedloom.engine.visit import Visited

ROUNDS = 20  # in which a newcomer tries architectures, for methods that search by rounds


def shared_state(state: State) -> State:
    """What newcomers may have: everything but what the server knows of single clients."""
    personal: dict[str, Any] = {item.name: {} for item in fields(state) if is_per_client(item)}
    return replace(state, **personal)


def welcome(method: Method[Any], state: Any, site: ClientSite, rounds: int = ROUNDS) -> Visited:
    """A newcomer's personal model."""
    answer = method.at(site.name).welcome(state, site.name, site, rounds)
    if answer.model is None or answer.report.arrays or answer.report.facts:
        raise ClientFailed(f"{site.name}: a newcomer must end with a personal model and send nothing", client=site.name)
    return Visited(answer, site.clock.seconds, process_memory_mb())


def check_joinable(method: Method[Any], name: str) -> None:
    if not method.uploads:  # nobody sends anything, so there is nothing that is shared
        raise InvalidConfig(f"{name} shares nothing that a newcomer could use", key="method")
