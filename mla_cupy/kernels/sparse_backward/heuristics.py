"""Preferences of the sparse backward: numbers that were measured."""

MIN_SAVED_TILES = 4
"""Least tiles that pieces must save over a whole list: starting them and adding up their parts of dq takes the time of
two to three tiles.
"""
