"""Text of a PTX module to typed instructions."""
