"""Functions for PyTorch's tensors, of each operation: a module for each of `mla_cupy.ops`, written by a command."""
