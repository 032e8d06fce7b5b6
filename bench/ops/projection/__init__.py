"""W_UK before decode, and merge and W_UV after it."""
