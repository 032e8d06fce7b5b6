"""Benchmarks of mla_cupy against its peers and against the limits of the machine.

Run `python -m bench --help` from a checkout, or `mla-cupy bench --help` where the package is installed.
Results are checked before anything is timed; every figure is the median over replays of calls whose inputs rotate
past the L2 cache; every share is of a limit measured in the same run. README.md in this folder has the details.
"""
