"""The sparse backward."""
