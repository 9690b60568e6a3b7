"""The one training loop, the one scoring function, and the bench a method works at."""
