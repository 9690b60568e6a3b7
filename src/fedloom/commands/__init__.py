"""Every command, one file a topic: arguments, words on the terminal, nothing else."""
