"""Found by every Python process of an engine that is diagnosed, by its path: see `tests.engines.gpu.diagnose`."""

from tests.engines.gpu import diagnose

diagnose.watch()
