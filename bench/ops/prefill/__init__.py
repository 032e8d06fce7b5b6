"""Prefill, un-absorbed."""
