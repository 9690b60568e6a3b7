"""Who proposes architectures to a client and who picks among them. One line per surrogate makes it known."""

from fedloom.search import rbf  # noqa: F401
