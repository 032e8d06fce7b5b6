"""Numbers as the instructions make them: rounding modes, narrow formats, fused products."""
