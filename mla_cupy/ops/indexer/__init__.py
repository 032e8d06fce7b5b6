"""The operations of the lightning indexer."""
