"""Other projects' kernels, one adapter per file. PyTorch and a peer's library are loaded only when it runs."""
