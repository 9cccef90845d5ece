"""A real OpenSSH server on loopback for tests: host keys, configuration and known_hosts of its own, nothing of the user's."""
