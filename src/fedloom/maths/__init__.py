"""Pure functions on arrays that can be checked with pen and paper."""
