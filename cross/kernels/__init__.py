"""Kernels: one file a class of operator, each builder a function from a frozen spec and a target to a PrimFunc."""
