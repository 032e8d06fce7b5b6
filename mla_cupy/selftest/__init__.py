"""`mla-cupy selftest`: is each instruction, on this GPU, what the kernels take it for?

From the bottom up: single instructions, then one block of each kernel, then the kernels. Each *probe* compares with
NumPy; what it expects follows from the formulas in `layouts`, which nothing else of the package uses. Where there is no
such GPU the same probes run in the simulator.
"""
