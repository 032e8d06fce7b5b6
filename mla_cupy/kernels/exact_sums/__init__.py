"""Sums whose bits do not depend on the order of their terms: bounds of the terms, and the bins that they go to."""

from mla_cupy.kernels.exact_sums import bins, bounds, norms

__all__ = ["KERNELS"]

KERNELS = (norms.KERNEL, bounds.KERNEL, bins.KERNEL)
