"""Barriers, clocks, and the detector of races."""
