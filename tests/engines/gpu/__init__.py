"""The real engines on a GPU: scripts for a machine with one, which get there as a parcel.

`python -m tests.engines parcel` builds the parcel; on the machine `check` compares tokens and times of backends. What
needs no GPU is rehearsed by the CPU's cases and by the tests of this folder.
"""
