"""Arguments that only make sense together: a group is one argument of a public function.

Inside the package the members of a group are passed under the names of an operation's arrays and options. `flat` alone
maps members to these names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Number
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from mla_cupy.errors import ArgumentError, explain, kind_of

__all__ = ["Fp8", "LossResults", "OutRope", "Packed", "Project", "Shard"]

_G = TypeVar("_G", bound="Group")


class Group:
    """Base of the groups."""

    absent: ClassVar[Mapping[str, Any]]
    """Names inside the package, and their values in a call without the group."""
    member_of: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """The members' names by their names inside the package, where these differ."""
    required: ClassVar[tuple[str, ...]] = ()
    """Members without a default, by their names inside the package."""

    def flat(self) -> dict[str, Any]:
        """The members by their names inside the package."""
        raise NotImplementedError

    @classmethod
    def gathered(cls: type[_G], flat: Mapping[str, Any]) -> _G | None:
        """The group with these members, by their names inside the package; None if all are absent."""
        given = {name: x for name, x in flat.items() if _differs(x, cls.absent[name])}
        if not given:
            return None
        members = {**{name: cls.absent[name] for name in cls.required}, **given}
        return cls(**{cls.member_of.get(name, name): x for name, x in members.items()})

    @classmethod
    def paths(cls, argument: str) -> dict[str, str]:
        """The callers' names of the members, by their names inside the package: "out_cos" is "out_rope.cos"."""
        return {name: f"{argument}.{cls.member_of.get(name, name)}" for name in cls.absent}


Structure = tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]
"""A group without its arrays: their members' names, then the other members' names and values."""


def leaves(group: Group) -> tuple[list[Any], Structure]:
    """Split a group into its arrays and the rest, which is hashable: a pytree of PyTorch or JAX."""
    members = {one.name: getattr(group, one.name) for one in fields(group)}  # type: ignore[arg-type]
    static = {name: x for name, x in members.items() if x is None or isinstance(x, (Number, str))}
    names = tuple(name for name in members if name not in static)
    return [members[name] for name in names], (names, tuple(static.items()))


def joined(kind: type[_G], structure: Structure, children: Iterable[Any]) -> _G:
    """Join the result of `leaves`; the leaves may be anything by now."""
    names, static = structure
    return kind(**dict(zip(names, children, strict=True)), **dict(static))


def _differs(value: Any, absent: Any) -> bool:
    kinds = (int, float) if isinstance(absent, float) else type(absent)
    of_a_kind = isinstance(value, kinds) and not isinstance(value, bool)  # True == 1, but is no scale
    return value is not absent and not (of_a_kind and value == absent)


def taken(group: Any, kind: type[Group], argument: str, names: tuple[str, ...]) -> tuple[Any, ...]:
    """The members of a group that an operation has, in the order of `names`.

    Raises
    ------
    ArgumentError
        If it is no such group, or has a member that the operation has not.
    """
    if group is None:
        return tuple(kind.absent[name] for name in names)
    if not isinstance(group, kind):
        members = ", ".join(one.name for one in fields(kind))  # type: ignore[arg-type]
        expected = f"mla_cupy.{kind.__name__} or None"
        raise ArgumentError(explain(argument, kind_of(group), expected, f"pass {kind.__name__}({members})"))
    flat = group.flat()
    for name in flat if len(flat) > len(names) else ():
        if name not in names and _differs(flat[name], kind.absent[name]):
            number = name.removesuffix("s")
            if number in names:  # of numbers and arrays the operation has numbers
                raise ArgumentError(explain(f"{argument}.{number}", "an array", "a number"))
            raise ArgumentError(explain(f"{argument}.{name}", "a value", "none: the operation has no such member"))
    return tuple([flat[name] for name in names])


@dataclass(frozen=True, eq=False)
class Packed(Group):
    """Sequences stored one after another in one array, without padding.

    Attributes
    ----------
    cu_seqlens_q : array, (b + 1,), int32
        Sequence n owns the queries from cu_seqlens_q[n] to cu_seqlens_q[n + 1].
    cu_seqlens_kv : array, (b + 1,), int32, optional
        Likewise for the keys, where these are packed, too.
    max_seqlen_q : int, optional
        For decode: the usual number of queries per sequence. It chooses the kernel; sequences with more queries work as
        well. Default: any number.
    """

    cu_seqlens_q: Any
    cu_seqlens_kv: Any = None
    max_seqlen_q: int | None = None

    absent: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"cu_seqlens_q": None, "cu_seqlens_kv": None, "max_seqlen_q": None}
    )
    required = ("cu_seqlens_q",)

    def flat(self) -> dict[str, Any]:
        """See `Group.flat`."""
        return {
            "cu_seqlens_q": self.cu_seqlens_q,
            "cu_seqlens_kv": self.cu_seqlens_kv,
            "max_seqlen_q": self.max_seqlen_q,
        }


@dataclass(frozen=True, eq=False)
class LossResults(Group):
    """Arrays that an indexer loss writes its results to. Arrays that are None are allocated.

    `LossResults(*results)` reuses the arrays that an earlier call returned.

    Attributes
    ----------
    kl, mass, index_lse : array, (s_q,) or per head (s_q, h), float32
        Results of each row.
    d_index_q, d_index_k : array, shapes of index_q and index_k, bfloat16 or float32
        Gradients; the last axes are contiguous.
    d_weights : array, (s_q, h_i), float32
        Gradient.
    out : array, (s_q, h, d_v), bfloat16
        Output of the attention, for `indexer_warmup_loss` with `v`; the last axis is contiguous.
    attention_lse : array, (s_q, h), float32
        Log-sum-exps of the attention, for `indexer_warmup_loss` with `v`.
    """

    kl: Any = None
    mass: Any = None
    index_lse: Any = None
    d_index_q: Any = None
    d_index_k: Any = None
    d_weights: Any = None
    out: Any = None
    attention_lse: Any = None

    absent: ClassVar[Mapping[str, Any]] = MappingProxyType(
        dict.fromkeys(("kl", "mass", "index_lse", "d_index_q", "d_index_k", "d_weights", "out", "attention_lse"))
    )

    def flat(self) -> dict[str, Any]:
        """See `Group.flat`."""
        return {
            "kl": self.kl,
            "mass": self.mass,
            "index_lse": self.index_lse,
            "d_index_q": self.d_index_q,
            "d_index_k": self.d_index_k,
            "d_weights": self.d_weights,
            "out": self.out,
            "attention_lse": self.attention_lse,
        }


@dataclass(frozen=True, eq=False)
class OutRope(Group):
    """Inverse RoPE of results, as in DeepSeek-V4, where values include the RoPE part of the keys.

    A pair (x, y) of neighbouring columns among the last 64 becomes (x * cos + y * sin, y * cos - x * sin).

    Attributes
    ----------
    cos, sin : array, (max_position, 32), float32
        The last axis is contiguous.
    positions : array, (b, s_q) or (total_q,), int32 or int64
        Rows of `cos` and `sin`, one per query; clamped to the tables.
    """

    cos: Any
    sin: Any
    positions: Any

    absent: ClassVar[Mapping[str, Any]] = MappingProxyType({"out_cos": None, "out_sin": None, "out_positions": None})
    member_of: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"out_cos": "cos", "out_sin": "sin", "out_positions": "positions"}
    )
    required = ("out_cos", "out_sin", "out_positions")

    def flat(self) -> dict[str, Any]:
        """See `Group.flat`."""
        return {"out_cos": self.cos, "out_sin": self.sin, "out_positions": self.positions}


@dataclass(frozen=True, eq=False)
class Project(Group):
    """Multiplication by W_UV after attention: out[.., h, d] = sum_c out[.., h, c] * w_uv[h, d, c].

    Attributes
    ----------
    w_uv : array, (h_q, d_head, 512), bfloat16 or float16
        The values' half of kv_b_proj, as stored in the weights: `kv_b_proj.reshape(h_q, -1, 512)[:, d_nope:]`. Its
        dtype is the dtype that `out` has without it; d_head is 64, 128, 192 or 256. The last axis is contiguous; the
        start and the other strides are multiples of 16 bytes.
    gate : array, (b, s_q, h_q, d_head), dtype of w_uv, optional
        The result is multiplied by sigmoid(gate), element by element. Strides as for w_uv.
    """

    w_uv: Any
    gate: Any = None

    absent: ClassVar[Mapping[str, Any]] = MappingProxyType({"w_uv": None, "gate": None})
    required = ("w_uv",)

    def flat(self) -> dict[str, Any]:
        """See `Group.flat`."""
        return {"w_uv": self.w_uv, "gate": self.gate}


@dataclass(frozen=True, eq=False)
class Fp8(Group):
    """Arithmetic and scales for FP8 queries and for a cache in the format "fp8"; the name of a cache's format.

    Attributes
    ----------
    math : str
        "exact": convert FP8 numbers to 16 bits, then multiply. "fp8": multiply on FP8 tensor cores (Hopper, Blackwell).
        "fp8x2": like "fp8", but each 16-bit element becomes the sum of two e4m3 numbers; only for dense decode on
        Hopper, more than 16 rows (s_q * h_q), no tree mask.
    q_scale : float, or array, (b, s_q, h_q) or (total_q, h_q), float32
        Scale of e4m3 queries, above 0: one for all, or one per row, as `mla_prepare` returns them.
    kv_scale : float, or array, (1,), float32
        Scale of a cache in the format "fp8"; above 0. An array requires FP8 matmuls; kernels read it, so it may change
        between replays of a CUDA graph.
    kv_format : str, optional
        Format of the cache, see `mla-cupy formats`. Default: the one of its width and of the queries' width. Tokens of
        528 bytes are "v41" by default; "v32-nope" names tokens without RoPE.

    Notes
    -----
    "fp8" rounds each row of 16-bit queries to e4m3, divided by a power of two, and the weights of each tile of 64
    tokens, the largest at 256: weights below 2^-18 of it (2^-14 on Blackwell) become 0. `out` is divided by the sum of
    the rounded weights, so it may be 0.06 % too small or too large. Scores whose terms all have one sign lose 0.1 to
    0.3 %, unless one column dominates. On Hopper, a bfloat16 result of a split request is rounded to bfloat16 twice.
    "fp8x2" keeps about eight bits of queries and weights, as bfloat16 does.
    """

    math: str = "exact"
    q_scale: Any = 1.0
    kv_scale: Any = 1.0
    kv_format: str | None = None

    absent: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"math": "exact", "q_scale": 1.0, "kv_scale": 1.0, "q_scales": None, "kv_scales": None, "kv_format": None}
    )
    member_of: ClassVar[Mapping[str, str]] = MappingProxyType({"q_scales": "q_scale", "kv_scales": "kv_scale"})

    def flat(self) -> dict[str, Any]:
        """See `Group.flat`."""
        of_q, of_kv = hasattr(self.q_scale, "shape"), hasattr(self.kv_scale, "shape")
        return {
            "math": self.math,
            "q_scale": 1.0 if of_q and self.q_scale.shape else self.q_scale,
            "kv_scale": 1.0 if of_kv and self.kv_scale.shape else self.kv_scale,
            "q_scales": self.q_scale if of_q and self.q_scale.shape else None,
            "kv_scales": self.kv_scale if of_kv and self.kv_scale.shape else None,
            "kv_format": self.kv_format,
        }


@dataclass(frozen=True, eq=False)
class Shard(Group):
    """Context parallelism: `world` ranks share the tokens of each sequence in turn.

    Token j of a rank's cache is token j * world + rank of the sequence.

    Attributes
    ----------
    world : int
        Number of ranks that share the tokens, from 1 to 65,536.
    rank : int
        This rank, from 0 to world - 1.
    """

    world: int
    rank: int

    absent: ClassVar[Mapping[str, Any]] = MappingProxyType({"cp_world": 1, "cp_rank": 0})
    member_of: ClassVar[Mapping[str, str]] = MappingProxyType({"cp_world": "world", "cp_rank": "rank"})
    required = ("cp_world", "cp_rank")

    def flat(self) -> dict[str, Any]:
        """See `Group.flat`."""
        return {"cp_world": self.world, "cp_rank": self.rank}


GROUPS: tuple[type[Group], ...] = (Fp8, LossResults, OutRope, Packed, Project, Shard)
"""All groups."""
