"""Calls of exported modules by the names of their handlers, for programs that run without this package."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mla_cupy import errors
from mla_cupy.dtypes import numpy_dtype
from mla_cupy.errors import ArgumentError, DTypeError, ShapeError, explain
from mla_cupy.export import xla
from mla_cupy.export.manifest import Manifest, RefusedError
from mla_cupy.jax.arguments import as_jax
from mla_cupy.jax.sharding import Parts, over_mesh, parts_of
from mla_cupy.ops import BOUND_OPERATIONS

__all__ = ["ExportedCall"]

_APART = 1 << 44
"""Bytes between the addresses of arrays that are only there to be checked."""
_L2_BYTES, _MEMORY = 50 << 20, 1 << 37


class ExportedCall:
    """A function of JAX that calls a module of `mla-cupy export --xla` by the name of its handler.

    Called with the module's arrays, it is one custom call, under `jit` and in what `jax.export` serialises. The process
    that runs it must have registered the handler, and needs neither this package nor CuPy: see the guide Exported JAX
    programs. There is no derivative, and `vmap` runs the calls one after the other. On a mesh with explicit axes the
    devices divide the call, and the module is for the arrays of one of them.

    Parameters
    ----------
    manifest : path
        The module's JSON file.
    sm_count : int
        Multiprocessors of the GPU that will run the program, which the size of the workspace may depend on. If it has
        more, the program may end with an error that says so.

    Attributes
    ----------
    target : str
        The name of the handler, such as "mla_cupy.decode.v1": for `jax.export.DisabledSafetyCheck.custom_call`, and for
        `jax.ffi.register_ffi_target`.
    """

    def __init__(self, manifest: str | os.PathLike[str], *, sm_count: int = 132) -> None:
        self._manifest = Manifest.read(Path(manifest))
        told = self._manifest.data
        if not all("input" in array for array in told["arrays"]):
            raise ArgumentError(explain("manifest", "one without inputs", "one of this version", "export it again"))
        self.target = xla.target(told["name"])
        self._device = {"sm_count": sm_count, "l2_bytes": _L2_BYTES, "total_memory": _MEMORY}

    def __call__(self, *arrays: Any, **options: Any) -> tuple[jax.Array, ...]:
        """Call the module with its inputs in the order of the manifest; options by name.

        Returns
        -------
        tuple
            The results in the order of the manifest. Inputs among them are changed where they lie if they are donated.

        Raises
        ------
        ShapeError, DTypeError
            If the arrays do not match the module.
        ArgumentError
            If an option is none of the module's.
        """
        names = xla.operands(self._manifest.data)
        if len(arrays) != len(names):
            raise ArgumentError(explain("arrays", len(arrays), f"{len(names)}: {', '.join(names)}"))
        operands = [as_jax(name, x) for name, x in zip(names, arrays, strict=True)]
        part = functools.partial(self._call, options)
        parts = self._parts(operands)
        divided = None if parts is None else over_mesh(parts, part, operands)
        return part(*operands) if divided is None else tuple(divided)

    def _parts(self, operands: Sequence[jax.Array]) -> Parts | None:
        """Axes along which devices may divide the call; None if the operands do not match the module."""
        told = self._manifest.data
        axes = {array["name"]: array["axes"] for array in told["arrays"]}
        given = [(axes[name], x.shape) for name, x in zip(xla.operands(told), operands, strict=True)]
        if any(len(names) != len(shape) for names, shape in given):
            return None
        return parts_of(
            BOUND_OPERATIONS[told["operation"]].parallel, given, [(axes[name], ()) for name in xla.results(told)]
        )

    def _call(self, options: Mapping[str, Any], *operands: jax.Array) -> tuple[jax.Array, ...]:
        """The call of one device."""
        told = self._manifest.data
        names, made = xla.operands(told), xla.results(told)
        sizes = self._sizes(dict(zip(names, operands, strict=True)))
        attributes = self._attributes(options)
        shapes = {array["name"]: self._shape(array, sizes) for array in told["arrays"]}
        nbytes = self._workspace(sizes, shapes, attributes) + xla.ALIGNMENT
        dtypes = {array["name"]: array["dtype"] for array in told["arrays"]}
        types = [jax.ShapeDtypeStruct(shapes[name], numpy_dtype(dtypes[name])) for name in made]
        results: Sequence[jax.Array] = jax.ffi.ffi_call(
            self.target,
            [*types, jax.ShapeDtypeStruct((nbytes,), jnp.uint8)],
            vmap_method="sequential",
            input_output_aliases={names.index(name): made.index(name) for name in made if name in names},
        )(*operands, **attributes)
        return tuple(results[: len(made)])

    def _sizes(self, operands: Mapping[str, jax.Array]) -> dict[str, int]:
        """The sizes that the shapes of the operands say, which must agree."""
        told, sizes = self._manifest.data, dict[str, int]()
        for array in told["arrays"]:
            if not array["input"]:
                continue
            name, x = array["name"], operands[array["name"]]
            if str(x.dtype) != array["dtype"]:
                raise DTypeError(explain(f"{name}.dtype", x.dtype, array["dtype"]))
            if x.ndim != len(array["axes"]):
                raise ShapeError(explain(f"{name}.ndim", x.ndim, f"{len(array['axes'])}: {', '.join(array['axes'])}"))
            for at, (axis, size) in enumerate(zip(array["axes"], x.shape, strict=True)):
                times, factors, plus = xla.axis(told, axis)
                product = times * int(np.prod([sizes[factor] for factor in factors if factor in sizes], dtype=np.int64))
                unknown = [factor for factor in factors if factor not in sizes]
                rest = size - plus
                fits = rest == product if not unknown else product > 0 and rest >= 0 and rest % product == 0
                if not fits:
                    expected = f"{axis}={product + plus}" if not unknown else f"a multiple of {product}"
                    raise ShapeError(explain(f"{name}.shape[{at}]", size, expected))
                sizes |= dict.fromkeys(unknown, rest // max(1, product))
        return sizes

    def _shape(self, array: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[int, ...]:
        found = []
        for each in array["axes"]:
            times, factors, plus = xla.axis(self._manifest.data, each)
            found.append(times * int(np.prod([sizes[factor] for factor in factors], dtype=np.int64)) + plus)
        return tuple(found)

    def _attributes(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """All options with their defaults, so that a program records its configuration."""
        known = {each["name"]: each for each in xla.options(self._manifest.data)}
        for name, value in options.items():
            if name not in known:
                raise ArgumentError(explain(name, value, "one of " + (", ".join(known) or "no options")))
        for name in known:
            if name not in options and "default" not in known[name]:
                raise ArgumentError(explain(name, None, "a number: it has no default", f"pass {name}=..."))
        given = {name: options[name] if name in options else each["default"] for name, each in known.items()}
        return {
            name: np.float64(value) if known[name]["kind"] == "real" else np.int32(value)
            for name, value in given.items()
        }

    def _workspace(
        self, sizes: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]], attributes: Mapping[str, Any]
    ) -> int:
        """The most bytes that a target needs; each target's rules are evaluated for arbitrary addresses."""
        values: dict[str, Any] = {**sizes, "workspace": 1 << 62, "workspace_bytes": 1 << 61}
        values |= {name: value.item() for name, value in attributes.items()}
        values |= {f"device.{name}": value for name, value in self._device.items()}
        for at, array in enumerate(self._manifest.data["arrays"]):
            name, shape = array["name"], shapes[array["name"]]
            values[name] = (at + 1) * _APART
            for axis in range(array["strides"]):
                values[f"{name}_strides[{axis}]"] = int(np.prod(shape[axis + 1 :], dtype=np.int64))
        try:
            for target in self._manifest.data["targets"]:
                self._manifest.steps(target, "call", values)
        except RefusedError as error:
            raise getattr(errors, error.kind)(str(error)) from None
        return max(self._manifest.workspace(target, "call", values) for target in self._manifest.data["targets"])
