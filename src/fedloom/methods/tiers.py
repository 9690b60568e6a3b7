"""Tiers of clients, for methods that give weak devices smaller networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedloom.core.boundary import Manifest, Upload
from fedloom.core.client_site import ClientSite
from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import Arrays, Report
from fedloom.core.seeds import rng
from fedloom.training.tools import Tools

TIER = "tier"


def uploads(tools: Tools | None) -> Manifest:
    """Where hardware has tiers a client says which is its own: the server does not know devices. Without tools: as by default."""
    if tools is None or tools.tiers == 1:
        return {}
    return {TIER: Upload("which class of device it is (hardware.*)", high=tools.tiers - 1)}


def facts(tools: Tools, site: ClientSite) -> dict[str, int]:
    return {TIER: site.hardware.tier} if tools.tiers > 1 else {}


def reported(known: Arrays, reports: Sequence[Report]) -> dict[str, Any]:
    """Tiers of clients with what these reports say."""
    return {**known, **{report.client: np.array(int(report.facts[TIER])) for report in reports if TIER in report.facts}}


def tier_of(tools: Tools, known: Arrays, seed: int, client: str, count: int) -> int | None:
    """Of hardware, once the client has reported it, and nothing before. Tiers with budgets are public. Where all devices are alike it is
    drawn, for the whole run."""
    if tools.tiers == 1:
        return int(rng(seed, client, TIER).integers(count))
    if tools.fleet:
        return tools.fleet.tier_of.get(client)
    return int(known[client]) if client in known else None


def check(name: str, given: int, tiers: int) -> None:
    """Refuses a list with fewer numbers than there are tiers of hardware; more do not matter."""
    if tiers > 1 and given < tiers:
        what = f"{name} has {given} numbers for {tiers} tiers (hardware.*)"
        raise InvalidConfig(f"{what}. Give one for each tier", key=name)
