"""Plugins for inference engines: each is found by its engine through an entry point. They need PyTorch."""
