"""The exact top-k of the indexer's logits."""
