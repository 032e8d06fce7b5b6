"""The rules of the ISA that production kernels bend, by name: each can be allowed, and is then a warning."""

from __future__ import annotations

from collections.abc import Collection

RULES = {
    "alloc-grows": "a tcgen05.alloc asks for more columns than the one before it",
    "bulk-exit": "a block exits before bulk stores have read its shared memory",
    "cta-group": "a kernel mixes .cta_group::1 and .cta_group::2",
    "dealloc-warp": "tensor memory is freed by another warp than the one that allocated it",
    "lane-store": "lanes of one store write different values to one address, and any of them may stay",
    "ld-no-wait": "a warp meets others, or ends, after a tcgen05.ld and no tcgen05.wait::ld",
    "ld-wait": "registers of a tcgen05.ld are used before tcgen05.wait::ld (compilers move instructions ahead of it)",
    "mbarrier-init": "an mbarrier is initialised again without mbarrier.inval, or by several lanes",
    "mbarrier-init-fence": "an mbarrier is used asynchronously or remotely before a fence of its initialisation",
    "padding-bits": "padding bits of 4- and 6-bit containers in tensor memory are set",
    "sparse-metadata": "metadata of an mma.sp means nothing: equal indices, or falling ones in .sp::ordered_metadata",
    "tcgen05-collective": "alloc, dealloc or relinquish_alloc_permit is executed by some lanes of a warp only",
    "tcgen05-issue": "several threads of a warp issue one mma, cp, shift or commit at once",
    "tcgen05-order": "tensor-core operations of one thread touch the same cells and nothing orders them",
    "tensormap-fence": "a tensor map that the kernel has edited is used without its fence",
    "tmem-lanes": "a tensor-memory address names lanes outside the warp's quadrant, or differs between lanes",
    "wgmma-fence": "no wgmma.fence orders registers before a wgmma",
    "wmma-fragment": "a fragment is used as another operand, shape, layout or type than wmma.load gave it",
    "copy-proxy": "the asynchronous proxy meets what cp.async, st.async or tcgen05.alloc wrote without a proxy fence",
    "relaxed-order": "accesses are ordered only by relaxed flags or a relaxed cluster arrive",
    "scope": "strong accesses name scopes that do not include each other",
    "tcgen05-fence": "tensor memory is ordered by a barrier without the tcgen05 fences beside it",
    "poison": "an undefined or pending value is used",
}
"""Description of what breaks each rule."""

LENIENT = frozenset(RULES) - {"poison"}
"""Rules whose breach ``strict=False`` allows."""

CLOCKED = frozenset(("copy-proxy", "relaxed-order", "tcgen05-fence"))
"""Rules about the order of accesses; the detector keeps a second set of clocks, in which bent rules order, too."""

ORDERING = CLOCKED | {"scope"}
"""Rules about the order of accesses, and the rule that no clock can express: which scopes include each other."""


def allowed(strict: bool, allow: Collection[str]) -> frozenset[str]:
    """Return the rules that may be broken, with a warning.

    Raises
    ------
    ValueError
        If there is no such rule.
    """
    names = frozenset((allow,)) if isinstance(allow, str) else frozenset(allow)
    if unknown := sorted(names - set(RULES)):
        raise ValueError(f"unknown rule {unknown[0]!r}; the rules are {', '.join(sorted(RULES))}")
    return names if strict else names | LENIENT
