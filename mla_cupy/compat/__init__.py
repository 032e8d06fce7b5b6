"""Drop-in replacements for functions of other libraries. All except `flash_mla` need PyTorch."""
