"""Model to binary, on the host: import, training graph, kernels, memory plan, link."""
