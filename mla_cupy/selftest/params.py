"""Parameter structs of the probes' kernels, as the host fills them.

Written by `python -m tools.generate` from the CUDA sources, which say what each member means.
"""

from __future__ import annotations

from mla_cupy.kernels.param_layout import I32, Address, Params


class ProbeCopyParams(Params):
    """Struct of `probes/copy.cu`."""

    rows: Address
    in_: Address
    out: Address
    gathers: I32
    c0: I32
    c1: I32
    c2: I32


class Product(Params):
    """Struct of `probes/mma.cu`."""

    m: I32
    n: I32
    a_mn_major: I32
    b_mn_major: I32
    lane: I32
    column: I32
    steps: I32
    accumulate: I32


class ProbeMmaParams(Params):
    """Struct of `probes/mma.cu`."""

    a: tuple[Address, Address]
    b: tuple[Address, Address]
    cells: Address
    dump: Address
    product: tuple[Product, Product]
    products: I32
    window: I32


class ProbePairParams(Params):
    """Struct of `probes/pair.cu`."""

    a: Address
    rows: Address
    cells: Address
    dump: Address
    n: I32
    accumulate: I32
    window: I32


class ProbeReduceParams(Params):
    """Struct of `probes/reduce.cu`."""

    values: Address
    wanted: Address
    sums: Address
    groups: I32


class ProbeStmatrixParams(Params):
    """Struct of `probes/stmatrix.cu`."""

    scores: Address
    in_: Address
    out: Address


class ProbeTmemParams(Params):
    """Struct of `probes/tmem.cu`."""

    cells: Address
    registers: Address
    loaded: Address
    dump: Address
    window: I32
    lane: I32
    column: I32
    group: I32
    store: I32
