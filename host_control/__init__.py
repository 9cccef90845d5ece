"""The host's side: command line, boards, search and studies."""
