"""`mla-cupy selftest`: does each instruction, on this GPU, do what the kernels assume?

From the bottom up: single instructions, then one block of each kernel, then the kernels. Each *probe* compares with
NumPy; its expectations follow from the formulas in `layouts`, which nothing else of the package uses. Without such a
GPU the same probes run in the simulator.
"""
