"""Writing, reading and copying tokens of a paged cache."""
