"""Two source trees: timed in turn on one GPU, or compared by their machine code."""
