"""What several test files use that is no fixture."""
