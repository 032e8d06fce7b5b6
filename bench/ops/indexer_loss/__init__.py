"""The losses that train the lightning indexer."""
