"""`bench compare-trees`: two source trees timed in turn on one GPU."""
