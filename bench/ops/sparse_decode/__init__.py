"""Sparse decode from FP8 records."""
