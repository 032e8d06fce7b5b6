"""Shared by several test suites: hostile inputs and the tolerance rule."""
