"""Claims that circulate about paged caches, computed from the cache's own bookkeeping."""
