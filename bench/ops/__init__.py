"""One folder per operation: its cases, inputs, checks, our own calls, and the record that `core` runs."""
