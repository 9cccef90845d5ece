"""Weights as people have them: safetensors, npz, and PyTorch state dicts (zip and legacy), read without executing anything.

`load_weights` reads a file, `match_weights` gives its tensors to a model; each format is one file.
"""
