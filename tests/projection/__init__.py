"""W_UK before attention, and merge and W_UV after it."""
