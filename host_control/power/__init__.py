"""Batch size and CPU frequency under a power limit (Ahmed et al., TMLR 10/2025); docs/power.md."""
