"""From settings to objects: the one place that knows which part goes where."""
