"""What `learn` does on the host: its flags, the settings that it compares, the runs on the board, and what it leaves."""
