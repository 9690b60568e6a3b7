"""How a method runs: the round loop, the ways to reach clients, and the run folder. One line per engine makes it known."""

from fedloom.engine import inline, processes, ray  # noqa: F401
