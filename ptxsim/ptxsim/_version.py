"""The version of the simulator, in one place."""

__version__ = "0.1.0"
