"""Choosing batch sizes: the space, one file a strategy, and the rule that names bs_opt. Knows nothing of boards."""
