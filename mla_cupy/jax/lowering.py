"""Custom calls of XLA, made of traced calls: a callback on device buffers, or the handler of `mla_cupy.jax.ffi`.

Both get a workspace as an additional result, which XLA owns, and enqueue on XLA's stream. JAX offers the callback for
this purpose; the handler serves `jax.export`, which cannot serialise callbacks, and JAX before 0.6.1, which has none.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mla_cupy.dtypes import numpy_dtype
from mla_cupy.errors import DTypeError, explain
from mla_cupy.jax import ffi
from mla_cupy.jax.arguments import as_jax
from mla_cupy.jax.derivatives import constant
from mla_cupy.jax.devices import gpu_ordinals, launcher, locate
from mla_cupy.jax.sharding import Axes, Parts, Run, are_spread, by_shardy, can_ask, over_mesh, parts_of
from mla_cupy.jax.varying import spread
from mla_cupy.ops.bind import Launcher, Shaped, Signature, options_of
from mla_cupy.ops.checks import check_flag
from mla_cupy.ops.operation import Operation, axes_of

try:
    from jax.experimental.buffer_callback import buffer_callback
except ImportError:  # JAX before 0.6.1
    buffer_callback = None


def run(
    operation: Operation, arrays: tuple[Any, ...], options: tuple[Any, ...], exportable: bool = False
) -> tuple[Any, ...]:
    """Run, or trace, an operation by its arrays and options in the order of the record: see `call`."""
    named = zip(operation.names, arrays, strict=True)
    return call(operation, dict(named), dict(zip(operation.bound_options, options, strict=True)), exportable)


def call(
    operation: Operation, given: Mapping[str, Any], options: Mapping[str, Any], exportable: bool
) -> tuple[Any, ...]:
    """Run, or trace, an operation.

    Parameters
    ----------
    operation : Operation
    given : mapping
        Its arrays by name. Outputs among them give their memory to the results.
    options : mapping
        The caller's other arguments.
    exportable : bool
        Whether `jax.export` must be able to serialise it.

    Returns
    -------
    tuple
        The results in the order of the record; None where there is no such result.
    """
    exportable = check_flag("exportable", exportable)
    arrays = {name: as_jax(name, x) for name in operation.names if (x := given.get(name)) is not None}
    signature = signature_of(operation, arrays, options)
    run = functools.partial(_over_devices, signature, exportable)
    made = iter(spread(constant(operation.name, run, arrays), arrays.values()))
    return tuple(None if result is None else next(made) for result in signature.results)


def signature_of(operation: Operation, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Signature:
    """A call, checked, by JAX's arrays."""
    for array in operation.inputs:
        if not array.optional and arrays.get(array.name) is None:
            raise DTypeError(explain(array.name, "None", "an array of JAX or NumPy"))
    shaped = tuple(_shaped(arrays.get(name)) for name in operation.names)
    signature = Signature(operation.name, shaped, options_of(operation, options))
    signature.request  # noqa: B018 (raises what does not fit, before anything is traced)
    return signature


def _shaped(x: Any) -> Shaped | None:
    return None if x is None else (tuple(x.shape), str(x.dtype))


def _over_devices(signature: Signature, exportable: bool, *operands: Any) -> Sequence[Any]:
    """A call that devices divide if its arrays are sharded."""
    by_handler = exportable or buffer_callback is None
    whole = functools.partial(_by_platform, signature, by_handler)
    if not signature.record.parallel:
        return whole(*operands)
    divided = over_mesh(_parts(signature), functools.partial(_part, signature, by_handler), operands)
    if divided is not None:
        return divided
    if exportable or not can_ask():
        return whole(*operands)
    if any(isinstance(x, jax.core.Tracer) for x in operands):
        return _shared(signature)(*operands)
    found: Sequence[Any] = jax.jit(_shared(signature))(*operands) if are_spread(operands) else whole(*operands)
    return found


@functools.lru_cache(maxsize=1024)
def _shared(signature: Signature) -> Run:
    whole = functools.partial(_by_platform, signature, buffer_callback is None)
    return by_shardy(_parts(signature), whole, functools.partial(_part, signature, True))


def _part(signature: Signature, by_handler: bool, *operands: Any) -> Sequence[Any]:
    """Make the same call for arrays of other sizes."""
    given = iter(operands)
    shaped = tuple(None if x is None else _shaped(next(given)) for x in signature.arrays)
    return _by_platform(Signature(signature.operation, shaped, signature.options), by_handler, *operands)


def _parts(signature: Signature) -> Parts:
    record = signature.record
    arrays = dict(zip(record.names, signature.arrays, strict=True))
    axes = {each.name: axes_of(each, arrays) for each in record.inputs}
    axes |= {each.name: axes_of(each, arrays) for each in record.outputs}
    axes |= {output.name: axes[output.like] for output in record.outputs if output.like}

    def with_names(names: Sequence[str], shaped: Sequence[Shaped | None]) -> list[Axes]:
        there = [(axes[name], each[0]) for name, each in zip(names, shaped, strict=True) if each is not None]
        return [(_present(each, len(shape)), shape) for each, shape in there]

    given, parallel = with_names(record.names, signature.arrays), dict(record.parallel)
    if arrays.get("cu_seqlens_q") is not None:
        parallel.pop("b", None)  # packed queries have no axis of sequences, with which the others would be divided
    return parts_of(parallel, given, with_names(signature.result_names, signature.results))


def _present(axes: Sequence[str], ndim: int) -> list[str]:
    """The axes that an array has; one that ends in "?" may be missing."""
    return [name.removesuffix("?") for name in axes if len(axes) == ndim or not name.endswith("?")]


def _by_platform(signature: Signature, by_handler: bool, *operands: Any) -> Sequence[Any]:
    """Concrete arrays determine the device; for a traced call XLA lowers the branch of the platform that it compiles
    for.
    """
    through = _through_handler if by_handler else _through_callback
    ordinals = gpu_ordinals()
    place = _place_of(operands)
    if not ordinals or place == "cpu":
        return through(signature, None)(*operands)
    on_gpu = through(signature, launcher(signature, ordinals))
    if place is not None:
        return on_gpu(*operands)
    results: Sequence[Any] = jax.lax.platform_dependent(*operands, cpu=through(signature, None), cuda=on_gpu)
    return results


def _place_of(operands: Sequence[Any]) -> str | None:
    """The platform of arrays; None while JAX traces."""
    if any(isinstance(x, jax.core.Tracer) for x in operands):
        return None
    arrays = [x for x in operands if isinstance(x, jax.Array)]
    place: str = next(iter(arrays[0].devices())).platform if arrays else jax.default_backend()
    return place


def _result_types(signature: Signature, nbytes: int) -> list[jax.ShapeDtypeStruct]:
    """The results that there are, then the workspace if one is needed."""
    types = [jax.ShapeDtypeStruct(shaped[0], numpy_dtype(shaped[1])) for shaped in signature.results if shaped]
    return [*types, jax.ShapeDtypeStruct((nbytes,), jnp.uint8)] if nbytes else types


def _through_callback(signature: Signature, ready: Launcher | None) -> Run:
    """Make a call on the GPUs of `ready`, or on the CPU."""
    nbytes = ready.nbytes if ready else 0
    count = len(_result_types(signature, 0))
    callback = functools.partial(_on_cpu, signature) if ready is None else functools.partial(_on_gpu, ready)

    def branch(*operands: Any) -> Sequence[Any]:
        results = buffer_callback(
            callback,
            _result_types(signature, nbytes),
            vmap_method="sequential",
            input_output_aliases=dict(signature.targets),
            command_buffer_compatible=True,
        )(*operands)
        kept: Sequence[Any] = results[:count]
        return kept

    return branch


def _on_cpu(signature: Signature, context: Any, results: Sequence[Any], *operands: Any) -> None:
    signature.on_host([np.asarray(x) for x in operands], [np.asarray(x) for x in results])


def _on_gpu(ready: Launcher, context: Any, results: Sequence[Any], *operands: Any) -> None:
    """Runs once per capture if XLA makes a CUDA graph of it, else once per execution."""
    ordinal, addresses = locate((*operands, *results))
    ready.enqueue(ordinal, addresses, context.stream)


def _through_handler(signature: Signature, ready: Launcher | None) -> Run:
    """Make a call that describes itself, so that another process can run it."""
    ffi.register()
    nbytes = ready.nbytes if ready else 0
    count = len(_result_types(signature, 0))

    def branch(*operands: Any) -> Sequence[Any]:
        results = jax.ffi.ffi_call(
            ffi.TARGET,
            _result_types(signature, nbytes),
            vmap_method="sequential",
            input_output_aliases=dict(signature.targets),
        )(*operands, call=signature.to_text())
        kept: Sequence[Any] = results[:count]
        return kept

    return branch
