"""What the sparse operations share: cases, indices, sampled checks."""
