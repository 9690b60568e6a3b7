"""What a report draws: pure functions from what a run left to figures."""
