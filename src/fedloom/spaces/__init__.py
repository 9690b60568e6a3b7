"""Search spaces: definitions that never hold a sample or a weight. One line per space makes it known."""

from fedloom.spaces import darts, mobilenetv3, nasvit, networks  # noqa: F401
