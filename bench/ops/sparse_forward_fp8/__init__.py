"""The sparse forward from FP8 records."""
