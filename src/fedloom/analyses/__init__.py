"""What papers report beside accuracy, worked out from a run's folder."""
