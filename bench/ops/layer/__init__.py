"""A decode layer between its projections and the output projection."""
