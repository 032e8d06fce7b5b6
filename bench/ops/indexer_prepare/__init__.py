"""The preparation of index queries."""
