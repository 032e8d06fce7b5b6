"""Prefill, un-absorbed, backward."""
