"""The one training loop, the one scoring function, and the tools of a method."""
