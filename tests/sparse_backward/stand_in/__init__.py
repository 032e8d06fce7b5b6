"""The Blackwell kernels on a Hopper GPU, with stand-ins for instructions that only Blackwell has."""
