"""Dense paged decode."""
