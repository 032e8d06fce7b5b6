"""The sparse forward."""
