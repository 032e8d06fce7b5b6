"""The loss that warms the lightning indexer up."""
