"""What we are compared with: one worker a peer, each point measured in a process of its own."""
