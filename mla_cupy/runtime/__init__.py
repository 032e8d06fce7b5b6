"""Compile, cache, load and launch kernels.

Nothing here imports CuPy or `cuda.bindings` at module level: everything but loading and launching works on a
machine without a GPU, a driver or CuPy.
"""
