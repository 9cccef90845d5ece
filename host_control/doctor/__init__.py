"""What stands in the way of training, on this host or on a board: findings with their consequence and remedy."""
