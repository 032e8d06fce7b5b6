"""Emitters of atom and red in global, shared and generic memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ..arithmetic.formats import to_bf16, to_f16
from ..arithmetic.numeric import LaneSet, Poison, count_nonzero, flush
from ..memory.spaces import INIT_ONES
from ..parsing.ir import SINK, TYPE_BITS, Instr, Vec
from ..state.warp import Warp
from ..synchronisation.strong import Order
from ..translation.cfg import VIEWS
from ..translation.codegen import Codegen
from ..translation.registry import Mods, op
from .async_forms import red_async
from .load_store import _locate, _several_buffers, by_buffer, by_space, make_load, make_store, memory_mods, vector_count

_OPS = ("and", "or", "xor", "cas", "exch", "add", "inc", "dec", "min", "max")


@op("atom red", "call", dsts=lambda ins: 1 if ins.op == "atom" else 0)
def _atom(cg: Codegen, ins: Instr, mods: Mods) -> None:
    if mods.flag("async") and "mmio" not in mods.left:
        return red_async(cg, ins, mods)
    space, order = memory_mods(mods, atomic=True)
    kind = mods.choose(*_OPS)
    mods.flag("noftz")
    count = vector_count(mods)
    type_name = mods.type()
    hint = mods.flag("L2::cache_hint")
    args = list(ins.args)
    if hint:
        args.pop()
    dst = args.pop(0) if ins.op == "atom" else SINK
    address, *values = args
    if len(values) != (2 if kind == "cas" else 1):
        mods.fail("operand form")
    if type_name == "b128":
        return _wide_atomic(cg, ins, mods, space, order, kind, dst, address, values)
    operands = [item for v in values for item in (v.items if isinstance(v, Vec) else (v,))]
    results = dst.items if isinstance(dst, Vec) else (dst,) * count
    combine = combiner(kind, type_name)
    if combine is None:
        mods.fail(f"operation .{kind} on .{type_name}")
    bits = 32 if space.startswith("shared") else 64
    want = any(r is not SINK for r in results)
    run = make_atomic(space, type_name, count, kind, combine, ins, want, order)
    raw = f"b{TYPE_BITS[type_name]}"
    sources = [(address, f"addr{bits}")] + [(v, raw) for v in operands]
    return cg.call(run, sources, [(r, raw) for r in results] if want else [])


def _wide_atomic(
    cg: Codegen,
    ins: Instr,
    mods: Mods,
    space: str,
    order: Order,
    kind: str,
    dst: Any,
    address: Any,
    values: list,
) -> None:
    """Emit ``atom.{exch,cas}.b128``, one lane after the other."""
    if kind not in ("exch", "cas"):
        mods.fail("128-bit atomics exchange or compare and swap")
    load, store = (make(space, "u8", 2, ins, order) for make in (make_load, make_store))

    def run(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison, *given: np.ndarray | None) -> tuple:
        new, poison = given[-2:]
        old = np.zeros((len(a), 2), "u8")
        undefined = np.zeros(len(a), bool)
        with W.launch.exclusive:
            for lane in _order(W, len(a)):
                place = np.array([lane if L is None else L[lane]])
                one = slice(lane, lane + 1)
                low, low_bad, high, high_bad = load(W, place, a[one], None if qa is None else qa[one])
                old[lane] = low[0], high[0]
                undefined[lane] = any(q is not None and q[0] for q in (low_bad, high_bad))
                if kind == "exch" or (old[lane] == given[0][lane]).all():
                    mask = None if poison is None else poison[one]
                    store(W, place, a[one], None, new[one, 0].copy(), mask, new[one, 1].copy(), mask)
        return old, undefined if undefined.any() else None

    bits = 32 if space.startswith("shared") else 64
    cg.call(run, [(address, f"addr{bits}")] + [(v, "b128") for v in values], [(dst, "b128")])


def combiner(kind: str, type_name: str) -> Callable | None:
    """Return the scalar function ``(old, operand, operand2) -> new`` on a type's array form; plain sums are np.add."""
    view = VIEWS[type_name]
    if type_name in ("f16x2", "bf16x2", "f16", "bf16"):
        return _half_combiner(kind, type_name)
    table: dict[str, Callable] = {
        "exch": lambda old, x, y: x,
        "cas": lambda old, x, y: y if old == x else old,
        "add": np.add,
        "min": lambda old, x, y: min(old, x),
        "max": lambda old, x, y: max(old, x),
    }
    if view[0] != "f":
        table |= {
            "and": lambda old, x, y: old & x,
            "or": lambda old, x, y: old | x,
            "xor": lambda old, x, y: old ^ x,
            "inc": lambda old, x, y: old.dtype.type(0) if old >= x else old + old.dtype.type(1),
            "dec": lambda old, x, y: x if old == 0 or old > x else old - old.dtype.type(1),
        }
    return table.get(kind)


def _half_combiner(kind: str, type_name: str) -> Callable | None:
    """Return the combiner of 16-bit floats held as raw bits."""
    function = {"add": np.add, "min": np.fmin, "max": np.fmax}.get(kind)
    if function is None:
        return None
    brain = type_name.startswith("bf16")
    width = 4 if type_name.endswith("x2") else 2

    def run(old: np.generic, x: np.generic, y: Any) -> np.generic:
        pair = [np.array([v]).view(ml_dtypes.bfloat16 if brain else "f2").astype("f8") for v in (old, x)]
        total = function(*pair)
        return (to_bf16(total) if brain else to_f16(total).view("u2")).view(f"u{width}")[0]

    return run


def _array_code(type_name: str) -> str:
    """Return the array type in which a type's atomic is computed."""
    return f"u{TYPE_BITS[type_name] // 8}" if "16" in type_name else VIEWS[type_name]


def apply(
    view: np.ndarray, index: np.ndarray, values: list, combine: Callable, code: str, want: bool, order: Any
) -> np.ndarray | None:
    """Perform one element's atomic for all lanes; return old values when they are wanted."""
    operand = values[0].view(code) if values[0].dtype != np.dtype(code) else values[0]
    if not want and combine is np.add:
        np.add.at(view, index, operand)
        return None
    second = values[1].view(code) if len(values) > 1 else operand
    old = np.empty(len(index), view.dtype)
    for lane in order:
        at = index[lane]
        old[lane] = current = view[at]
        view[at] = combine(current, operand[lane], second[lane]) if combine is not np.add else current + operand[lane]
    return old


def apply_flushed(view: np.ndarray, index: np.ndarray, values: list, *rest: Any) -> np.ndarray | None:
    """Add float32 as global memory does: subnormal inputs and results become zero."""
    view[index] = flush(view[index])
    old = apply(view, index, [flush(values[0].view("f4"))], *rest)
    view[index] = flush(view[index])
    return old


def _order(W: Warp, count: int) -> Any:
    """Return the order in which lanes perform an atomic: any is legal, random mode shuffles."""
    return W.launch.rng.permutation(count) if W.launch.random else range(count)


def make_atomic(
    space: str, type_name: str, count: int, kind: str, combine: Callable, ins: Instr, want: bool, order: Order
) -> Callable:
    """Return the run-time function of an atomic in a state space."""
    code = _array_code(type_name)
    args = (code, count, kind, combine, ins, want, order)
    if space.startswith("shared"):
        return _shared(*args)
    if space == "global":
        return _global(*args)
    table = {"shared": _shared(*args), "global": _global(*args)}

    def generic(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison, *values: Any) -> Any:
        return by_space(W, L, a, qa, values, table, ins, 2 * count if want else 0)

    return generic


def _outputs(olds: list, want: bool, code: str) -> tuple | None:
    if not want:
        return None
    raw = f"u{code[1:]}"
    return tuple(x for old in olds for x in (old.view(raw), None))


def _global(code: str, count: int, kind: str, combine: Callable, ins: Instr, want: bool, order: Order) -> Callable:
    width = int(code[1:])
    shift = np.uint64(width.bit_length() - 1)
    perform = apply_flushed if combine is np.add and code == "f4" else apply

    def run(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison, *values: Any) -> Any:
        if qa is not None:
            W.poisoned(qa, ins, "an address", L)
        for poison in values[1::2]:
            if poison is not None:
                W.poisoned(poison, ins, "a global reduction", L)
        buffer, offset = _locate(W, ins, a, L, width * count)
        view, index = buffer.view(code), (offset >> shift).view(np.intp)
        if int(offset.max()) + width * count > buffer.size:
            if _several_buffers(W, a, buffer):
                return by_buffer(W, L, a, run, values, 2 * count if want else 0)
            W.out_of_bounds(ins, buffer, offset, width * count, L)
        if not buffer.writable:
            W.fault(ins, f"atomic on read-only {buffer.name}", L)
        W.global_write(buffer, offset, width * count, ins, order, want)
        operands = values[::2]
        olds = []
        with W.launch.exclusive:
            for k in range(count):
                mine = [operands[k]] if kind != "cas" else [operands[0], operands[1]]
                at = index + k
                olds.append(perform(view, at, mine, combine, code, want, _order(W, len(a))))
        W.traffic[4] += len(a) * width * count
        return _outputs(olds, want, code)

    return run


def _shared(code: str, count: int, kind: str, combine: Callable, ins: Instr, want: bool, order: Order) -> Callable:
    width = int(code[1:])
    shift = np.uint32(width.bit_length() - 1)

    def run(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison, *values: Any) -> Any:
        if qa is not None:
            W.poisoned(qa, ins, "an address", L)
        cta = W.cta
        offset = a - cta.shared_base
        if width > 1 and count_nonzero(offset & np.uint32(width - 1)):
            W.misaligned(ins, a, width, L)
        view, index = cta.shared.view(code), (offset >> shift).astype(np.intp)
        if int(index.max()) + count > len(view):
            return W.remote_shared(ins, a, L, run, values, 2 * count if want else 0)
        init = cta.shared.init_view(width)
        if cta.shadow is not None:
            W.shared_write(cta.shadow, offset, width, count, ins, order, want)
        olds, result = [], []
        for k in range(count):
            mine = [values[0], values[2]] if kind == "cas" else [values[2 * k]]
            at = index + k
            undefined = init[at] != INIT_ONES[width]
            poison = undefined if count_nonzero(undefined) else None
            olds.append(apply(view, at, mine, combine, code, want, _order(W, len(a))))
            given = values[2 * k + 1]
            if given is not None:
                init[at[given]] = 0
            elif kind == "exch":
                init[at] = INIT_ONES[width]
            result.append(poison)
        if not want:
            return None
        raw = f"u{width}"
        return tuple(x for old, poison in zip(olds, result, strict=False) for x in (old.view(raw), poison))

    return run
