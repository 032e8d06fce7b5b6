"""Gradients, by hand: a module for each of `mla_cupy.ops` whose operation has one."""
