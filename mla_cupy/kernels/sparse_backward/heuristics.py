"""Preferences of the sparse backward: numbers that were measured."""

MIN_SAVED_TILES = 4
"""Tiles of a whole list that pieces must be shorter by: starting them and adding up their parts of dq takes the time of
two to three."""
