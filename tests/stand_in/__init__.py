"""Blackwell's kernels on a Hopper GPU, with stand-ins for what only Blackwell has."""
