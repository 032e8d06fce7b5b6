"""Calls that devices divide among themselves: under `jit` with sharded arrays, JAX and XLA query the division here.

Along some axes, such as sequences and heads, a call consists of independent calls. A device with arrays sharded along
them runs the call for its own part; arrays without such an axis, such as a cache, are whole on every device. Otherwise
XLA would gather all arrays of a custom call, which is opaque to it.

If a mesh's axes are explicit, JAX knows the shardings while it traces, and `shard_map` divides the call. If they are
automatic, Shardy decides in the end, by a rule, and asks for the part of a device: that cannot be serialised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.custom_batching import sequential_vmap
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

Run = Callable[..., Sequence[Any]]
"""A call: arrays to arrays."""
Names = tuple[str, ...]
Axes = tuple[Sequence[str], tuple[int, ...]]
"""Names of an array's axes, and their sizes."""


@dataclass(frozen=True)
class Parts:
    """The axes along which devices may divide a call.

    Attributes
    ----------
    names : tuple of tuple of str
        For each axis of each array, the results last, the axis of the call with which it is divided; "" for none.
    shapes : tuple of tuple of int
        Their sizes.
    results : int
        How many of the arrays are results.
    """

    names: tuple[Names, ...]
    shapes: tuple[tuple[int, ...], ...]
    results: int

    def most(self, name: str) -> int:
        """The most parts that an axis of the call has; all axes divided with it have a multiple of them."""
        return math.gcd(*(size for axis, size in self._axes() if axis == name))

    def taken(self, specs: Sequence[Sequence[Any]], mesh: Mapping[str, int]) -> dict[str, Names]:
        """The mesh's axes that divide each axis of the call, taken from the first array that is sharded along it.

        Parameters
        ----------
        specs : sequence
            What a PartitionSpec has: of the operands, then perhaps of the results.
        mesh : mapping
            The sizes of its axes.
        """
        found: dict[str, Names] = {}
        for names, spec in zip(self.names, specs, strict=False):
            for name, entry in zip(names, spec, strict=False):
                wanted = entry if isinstance(entry, tuple) else (entry,)
                free = tuple(x for x in wanted if isinstance(x, str) and all(x not in used for used in found.values()))
                count = math.prod(mesh[axis] for axis in free)
                if name and name not in found and count > 1 and self.most(name) % count == 0:
                    found[name] = free
        return found

    def specs(self, taken: Mapping[str, Names]) -> tuple[tuple[P, ...], tuple[P, ...]]:
        """Specs of the operands, and of the results."""
        found = tuple(P(*(taken.get(name) for name in names)) for names in self.names)
        return found[: -self.results], found[-self.results :]

    def summed(self, part: Run, taken: Mapping[str, Names]) -> Run:
        """A device's call. A result that lacks a divided axis is a sum over it, and the devices add theirs up."""
        lacking = [
            tuple(axis for name, axes in taken.items() if name not in names for axis in axes)
            for names in self.names[-self.results :]
        ]

        def run(*operands: Any) -> Sequence[Any]:
            made = part(*operands)
            return tuple(jax.lax.psum(x, axes) if axes else x for x, axes in zip(made, lacking, strict=True))

        return run

    def rule(self, mesh: Mapping[str, int]) -> tuple[str, dict[str, Any]]:
        """The division in Shardy's notation, with its keywords; axes without a name stay whole.

        Of two axes in proportion the longer one gets a factor for the parts and one that stays whole within a part. The
        exception is an axis of the mesh with more devices than parts: Shardy would use some of them, for which JAX has
        no name. The shorter axis then stands alone, and `taken` decides.
        """
        most = {name: self.most(name) for name, _ in self._axes() if name}
        lead = {name: max(size for axis, size in self._axes() if axis == name) for name in most}
        paired = {name for name in most if all(most[name] % count == 0 for count in mesh.values())}
        whole: list[str] = []
        apart: list[str] = []
        sizes: dict[str, int] = {}

        def factor(name: str, size: int) -> str:
            if name and size == (most if name in paired else lead)[name]:
                return name
            if name and name not in paired:
                apart.append(f"apart{len(apart)}")
                return apart[-1]
            whole.append(f"whole{len(whole)}")
            if not name:
                return whole[-1]
            sizes[whole[-1]] = size // most[name]
            return f"({name} {whole[-1]})"

        arrays = [" ".join(map(factor, *axes)) for axes in zip(self.names, self.shapes, strict=True)]
        told = {name for name, size in self._axes() if name not in paired or size == most[name]}
        sizes |= {name: most[name] for name in paired - told}
        text = f"{', '.join(arrays[: -self.results])} -> {', '.join(arrays[-self.results :])}"
        return text, {"need_replication_factors": tuple(whole), **sizes}

    def _axes(self) -> Iterator[tuple[str, int]]:
        for axes in zip(self.names, self.shapes, strict=True):
            yield from zip(*axes, strict=False)


def parts_of(parallel: Mapping[str, Sequence[str]], operands: Sequence[Axes], results: Sequence[Axes]) -> Parts:
    """The axes of a call that may be divided, by `Operation.parallel`; shapes of results may be left out."""
    sizes = {name: size for axes in operands for name, size in zip(*axes, strict=True)}
    leads = {lead: lead for lead in parallel}
    for lead, others in parallel.items():
        shared = {name for name in others if name.endswith("?") and sizes.get(name[:-1], 1) == 1}
        leads |= {name.removesuffix("?"): lead for name in others if name not in shared}
    arrays = (*operands, *results)
    names = tuple(tuple(leads.get(name, "") for name in axes) for axes, _ in arrays)
    return Parts(names, tuple(tuple(shape) for _, shape in arrays), len(results))


def over_mesh(parts: Parts, part: Run, operands: Sequence[Any]) -> Sequence[Any] | None:
    """Results of a call that is divided by the shardings in its operands' types; None if these divide nothing."""
    shardings = [jax.typeof(x).sharding for x in operands] if hasattr(jax, "typeof") else []
    meshes = [x.mesh for x in shardings if x.mesh.axis_names and x.mesh.are_all_axes_explicit]
    if not meshes:
        return None
    held = [x.sharding.mesh for x in operands if _is_there(x) and isinstance(x.sharding, NamedSharding)]
    mesh = (held or meshes)[0]
    taken = parts.taken([x.spec for x in shardings], mesh.shape)
    if not taken:
        return None
    given, made = parts.specs(taken)
    run = jax.shard_map(parts.summed(part, taken), mesh=mesh, in_specs=given, out_specs=made, check_vma=False)
    found: Sequence[Any] = run(
        *(jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(operands, given, strict=True))
    )
    return found


def by_shardy(parts: Parts, whole: Run, part: Run) -> Run:
    """A call that devices divide as XLA partitions the program around it.

    Parameters
    ----------
    parts : Parts
    whole, part : callable
        The call, and the same for arrays of other sizes. XLA compiles `part` apart from the program, which keeps no
        callbacks for it: it may be none.
    """
    from jax.experimental.custom_partitioning import custom_partitioning

    def partition(mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        known = isinstance(operands[0].sharding, NamedSharding)
        specs = [x.sharding.spec for x in (*operands, *results)] if known else []
        taken = parts.taken(specs, mesh.shape)
        given, made = (tuple(NamedSharding(mesh, spec) for spec in side) for side in parts.specs(taken))
        return mesh, parts.summed(part, taken), made, given

    shared = custom_partitioning(lambda *operands: tuple(whole(*operands)))
    shared.def_partition(partition, sharding_rule=lambda mesh, *types: parts.rule(mesh.shape))
    found: Run = sequential_vmap(lambda *operands: tuple(shared(*operands)))  # JAX cannot vmap it
    return found


def can_ask() -> bool:
    """Tell whether there is anything to divide, and Shardy to do it: older versions of JAX have GSPMD instead."""
    return jax.device_count() > 1 and getattr(jax.config, "jax_use_shardy_partitioner", True)


def are_spread(operands: Sequence[Any]) -> bool:
    """True if concrete arrays are on more than one device."""
    return any(len(x.devices()) > 1 for x in operands if isinstance(x, jax.Array))


def _is_there(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
