"""What several test suites share: hostile inputs and the tolerance rule."""
