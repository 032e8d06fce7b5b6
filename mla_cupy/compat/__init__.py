"""Functions under the names and signatures that frameworks call already. All but `flash_mla` need PyTorch."""
