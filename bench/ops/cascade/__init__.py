"""Decode of sequences that share a prefix."""
