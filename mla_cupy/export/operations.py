"""The operations that can be exported, by the name that the command line has for them, and what each fixes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mla_cupy.errors import ArgumentError, explain
from mla_cupy.export import decode, plain
from mla_cupy.export.record import Recorder, record_call
from mla_cupy.export.subject import Subject


@dataclass(frozen=True)
class Exported:
    """An operation that can be exported.

    Attributes
    ----------
    subject : callable
        Makes its subject of the command's options, which it takes by name.
    record : callable
        `record(subject, arch)`.
    options : tuple of str
        The options that it takes.
    required : tuple of str
        Those among them that must be given.
    fitted : callable
        `fitted(subject)`: the subject, adapted to the optional inputs that were just added.
    """

    subject: Callable[..., Subject]
    record: Callable[[Subject, str], Recorder]
    options: tuple[str, ...]
    required: tuple[str, ...]
    fitted: Callable[[Subject], Subject] = lambda subject: subject


OPERATIONS: Mapping[str, Exported] = {
    "decode": Exported(
        decode.subject,
        decode.record,
        ("h_q", "s_q", "d_qk", "page_size", "dtype", "kv_format", "out_dtype", "d_head", "window", "math"),
        ("h_q", "page_size"),
        decode.fitted,
    ),
    "merge_states": Exported(plain.merge, record_call, ("h_q", "dtype", "out_dtype"), ("h_q",)),
    "cache_append": Exported(
        plain.cache_append, record_call, ("kv_format", "page_size", "dtype"), ("kv_format", "page_size")
    ),
    "sparse_forward": Exported(
        plain.sparse_forward, record_call, ("h_q", "topk", "d_qk", "dtype", "out_dtype"), ("h_q", "topk")
    ),
    "sparse_decode": Exported(
        plain.sparse_decode,
        record_call,
        ("h_q", "kv_format", "page_size", "topk", "s_q", "dtype", "out_dtype"),
        ("h_q", "kv_format", "page_size", "topk"),
    ),
    "indexer_logits_paged": Exported(
        plain.logits_paged, record_call, ("h_q", "page_size", "s_q", "d_index"), ("h_q", "page_size")
    ),
    "indexer_topk": Exported(plain.topk, record_call, ("topk",), ("topk",)),
    "indexer_prepare": Exported(plain.indexer_prepare, record_call, ("h_q", "d_index", "page_size"), ("h_q",)),
    "mla_prepare": Exported(
        plain.mla_prepare,
        record_call,
        ("h_q", "d_qk", "dtype", "out_dtype", "kv_format", "page_size", "theta"),
        ("h_q",),
        plain.beside_rope,
    ),
    "absorb": Exported(plain.absorb, record_call, ("h_q", "d_head", "dtype"), ("h_q",), plain.with_rope),
    "merge_project": Exported(
        plain.merge_project, record_call, ("h_q", "d_head", "dtype", "out_dtype"), ("h_q",), plain.like_weights
    ),
    "prefill": Exported(plain.prefill, record_call, ("h_q", "h_kv", "d_qk", "dtype", "out_dtype"), ("h_q",)),
}


_NOT_EXPORTED = {
    "mla_decode": ("out_cos", "out_sin", "out_positions"),
    "sparse_mla_decode": ("out_cos", "out_sin", "out_positions", "w_uv", "gate"),
}
"""Optional inputs that exported calls do without: other kernels take them."""


def exported(name: str) -> Exported:
    """An operation by its name.

    Raises
    ------
    ArgumentError
        If it cannot be exported.
    """
    if name not in OPERATIONS:
        expected = "one of " + ", ".join(OPERATIONS)
        raise ArgumentError(explain("--op", name, expected, "the guide From C and C++ lists the others"))
    return OPERATIONS[name]


def subject_of(name: str, given: Mapping[str, Any], arrays: Sequence[str] = ()) -> Subject:
    """The subject of an operation for the options that are given; None for one that is not.

    `arrays` are optional inputs that its calls have, too.

    Raises
    ------
    ArgumentError
        If one is missing, or is not one of the operation's.
    """
    operation = exported(name)
    for option, value in given.items():
        spelled = "--" + option.replace("_", "-")
        if value is not None and option not in operation.options:
            takes = ", ".join("--" + each.replace("_", "-") for each in operation.options)
            raise ArgumentError(explain(spelled, value, f"only the options of {name}: {takes}"))
        if value is None and option in operation.required:
            raise ArgumentError(explain(spelled, "nothing", f"a value: {name} is exported for one"))
    subject = operation.subject(**{option: given.get(option) for option in operation.options})
    return operation.fitted(replace(subject, dtypes={**subject.dtypes, **_dtypes(subject, arrays)}))


def _dtypes(subject: Subject, arrays: Sequence[str]) -> dict[str, str]:
    """The dtypes of further inputs: the first that the operation takes."""
    optional = {
        each.name: each
        for each in subject.operation.inputs
        if each.optional and each.name not in (*subject.dtypes, *_NOT_EXPORTED.get(subject.operation.name, ()))
    }
    found = {}
    for name in arrays:
        if name not in optional:
            raise ArgumentError(
                explain("--with", name, "one of " + (", ".join(optional) or "nothing: it has them all"))
            )
        dtype = optional[name].dtypes[0]
        found[name] = subject.dtypes[dtype[1:]] if dtype.startswith("=") else dtype
    return found
