"""`bench model`: predicted times of kernels that no GPU has run yet."""
