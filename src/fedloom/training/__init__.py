"""The one training loop, the one scoring function, and the tools a method works at."""
