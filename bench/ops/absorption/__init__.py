"""Attention to a paged cache in both forms: absorbed, and un-absorbed with keys and values per head."""
