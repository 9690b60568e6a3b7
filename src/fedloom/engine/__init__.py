"""How a method runs: the round loop, the ways to reach clients, and the run folder."""
