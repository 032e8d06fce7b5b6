"""A launch as it runs: blocks, warps, the queue of asynchronous work, faults and reports."""
