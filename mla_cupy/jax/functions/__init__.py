"""Functions for JAX's arrays, of each operation: a module for each of `mla_cupy.ops`, written by a command."""
