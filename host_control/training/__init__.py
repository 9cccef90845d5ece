"""What `train` does on the host: defaults, schedule, the run on the board, and what it leaves."""
