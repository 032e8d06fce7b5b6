"""Found by every Python process of an engine whose graphs are timed, by its path: see `tests.engines.gpu.replays`."""

from tests.engines.gpu import replays

replays.watch()
