"""A real OpenSSH server on loopback: host keys, configuration, known_hosts of its own, nothing of the user's."""
