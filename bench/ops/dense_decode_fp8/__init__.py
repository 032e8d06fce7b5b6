"""Dense decode from FP8 records."""
