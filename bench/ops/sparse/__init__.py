"""Cases, indices and sampled checks that the sparse operations share."""
