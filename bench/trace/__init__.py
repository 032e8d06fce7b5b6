"""Traces: when each warp of a kernel waits, and for what."""
