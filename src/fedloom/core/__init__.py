"""The vocabulary of a federation. Numpy only; imports nothing else of the package."""
