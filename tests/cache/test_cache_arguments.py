"""Errors of `PagedKVCache` for values that are easily passed by mistake."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mla_cupy import ArgumentError, DTypeError, MlaError, PagedKVCache, ShapeError, UnsupportedDeviceError
from mla_cupy.runtime import device

SIZES: dict[str, Any] = {"num_pages": 10, "page_size": 4, "max_seqs": 4, "max_pages": 5, "device": "cpu"}
Call = Callable[[PagedKVCache, int], object]


def cache(record: Any = "bf16-nope", **changes: Any) -> PagedKVCache:
    return PagedKVCache(record, **{**SIZES, **changes})


def lengths_and_pages(made: PagedKVCache, sequence: int) -> tuple[Any, ...]:
    made.verify(device=True)
    return made.stats(), made.length(sequence), made.pages(sequence).tolist()


def refuses(call: Call, kind: type[MlaError], message: str) -> None:
    """Also once the cache remembers the sequences that were asked for last; and nothing changes."""
    made = cache()
    sequence, _ = made.allocate()
    made.extend([sequence], 3)
    before = lengths_and_pages(made, sequence)
    with pytest.raises(kind, match=message):
        call(made, sequence)
    assert lengths_and_pages(made, sequence) == before


MASKED = np.ma.masked_array([1, 2, 3], [False, True, False])
MASKED_CALLS: tuple[tuple[str, Call], ...] = (
    ("tokens", lambda c, s: c.allocate(MASKED)),
    ("tokens", lambda c, s: c.commit(s, MASKED)),
    ("sequences", lambda c, s: c.extend(MASKED)),
    ("sequences", lambda c, s: c.truncate(MASKED, 0)),
    ("sequences", lambda c, s: c.free(MASKED)),
    ("counts", lambda c, s: c.extend([s], MASKED[:1])),
    ("counts", lambda c, s: c.extend([s], np.ma.masked_array(1))),
    ("lengths", lambda c, s: c.truncate([s], MASKED[:1])),
)


@pytest.mark.parametrize(("argument", "call"), MASKED_CALLS)
def test_masked_arrays(argument: str, call: Call) -> None:
    refuses(call, DTypeError, f"{argument}: got a masked array")


def test_masked_latents() -> None:
    made = cache({"kv": "fp16-nope", "indexer": "indexer"})
    step = made.extend([made.allocate()[0]], 1)
    with pytest.raises(DTypeError, match="latent: got a masked array"):
        made.append(step, 0, np.ma.masked_array(np.ones((1, 512), np.float16)))
    with pytest.raises(DTypeError, match="k: got a masked array"):
        made.append_keys(step, 0, np.ma.masked_array(np.ones((1, 128), np.float16)))
    assert not made.layer(0).any()


NOT_SEQUENCES: tuple[tuple[str, Any], ...] = (
    ("an array", np.array([0, 1])), ("None", None), ("text", "a"), ("a list", [0]), ("a fraction", 0.5),
    ("bytes", b"\0" * 8), ("a large number", 2**64), ("True", True),
)  # fmt: skip
LISTS: tuple[tuple[str, Call], ...] = (
    ("extend", lambda c, x: c.extend([x], 1)),
    ("free", lambda c, x: c.free([x])),
    ("truncate", lambda c, x: c.truncate([x], 0)),
)
SINGLE: tuple[tuple[str, Call], ...] = (
    ("row", lambda c, x: c.row(x)),
    ("length", lambda c, x: c.length(x)),
    ("pages", lambda c, x: c.pages(x)),
    ("fork", lambda c, x: c.fork(x)),
    ("commit", lambda c, x: c.commit(x, [1])),
    ("reserve", lambda c, x: c.reserve(x, 1)),
)


@pytest.mark.parametrize("method", [name for name, _ in LISTS])
@pytest.mark.parametrize("kind", [kind for kind, _ in NOT_SEQUENCES if kind != "True"])  # which `array` takes for 1
def test_lists_of_what_is_no_sequence(method: str, kind: str) -> None:
    value = dict(NOT_SEQUENCES)[kind]
    refuses(lambda c, s: dict(LISTS)[method](c, value), ArgumentError, "sequences")


@pytest.mark.parametrize("method", [name for name, _ in SINGLE])
@pytest.mark.parametrize("kind", [kind for kind, _ in NOT_SEQUENCES])
def test_what_is_no_sequence(method: str, kind: str) -> None:
    value = dict(NOT_SEQUENCES)[kind]
    refuses(lambda c, s: dict(SINGLE)[method](c, value), ArgumentError, "sequence: got")


CALLS: tuple[tuple[str, Call], ...] = (
    ("sequences: got b", lambda c, s: c.extend(b"\0" * 8)),
    ("sequences", lambda c, s: c.extend(np.array([2**64 - 1], np.uint64))),
    ("sequences", lambda c, s: c.extend(np.array([[s]]))),
    ("sequences: got None", lambda c, s: c.free(None)),  # type: ignore[arg-type]
    (r"sequences: got \{0\}, expected a list", lambda c, s: c.extend({s})),  # type: ignore[arg-type]
    ("sequences: got {0: 2}, expected a list", lambda c, s: c.truncate({s: 2}, 0)),  # type: ignore[arg-type]
    ("sequences: got <memory", lambda c, s: c.free(memoryview(np.array([[s]])))),  # type: ignore[arg-type]
    ("tokens: got 100, expected at most 20", lambda c, s: c.reserve(s, np.int8(100))),  # type: ignore[arg-type]
    ("tokens: got 100, expected at most 20", lambda c, s: c.reserve(s, np.uint64(100))),  # type: ignore[arg-type]
    ("key: got 'lora', expected bytes; encode text", lambda c, s: c.allocate([1], key="lora")),  # type: ignore[arg-type]
    ("key: got None", lambda c, s: c.allocate([1], key=None)),  # type: ignore[arg-type]
    ("tokens: got 9223372036854775808, .* at most 2", lambda c, s: c.allocate([2**63])),
    ("tokens: got 18446744073709551615", lambda c, s: c.commit(s, np.array([1, 2**64 - 1], np.uint64))),
    (r"tokens: got \[18446744073709551616\]", lambda c, s: c.allocate([2**64])),
    (r"tokens: got \[1.0\]", lambda c, s: c.allocate([1.0])),
    ("tokens: got a list, .* read on the host", lambda c, s: c.allocate([[1], [2, 3]])),
    (r"tokens: got \[True\]", lambda c, s: c.allocate([True])),
    ("counts: got 9223372036854775807 in all", lambda c, s: c.extend([s, *c.fork(s)], [2**63 - 1, 2**63 - 1])),
    ("counts: got 9223372036854775808", lambda c, s: c.extend([s], [2**63])),
    ("counts", lambda c, s: c.extend([], 2**70)),
    ("counts: got a list", lambda c, s: c.extend([s], [[1], [1, 2]])),
    ("lengths: got 18446744073709551615", lambda c, s: c.truncate([s], np.array([2**64 - 1], np.uint64))),
    ("step: got None, expected the CacheStep", lambda c, s: c.append(None, 0, np.ones((1, 512)))),  # type: ignore[arg-type]
    ("step: got a list", lambda c, s: c.append_keys([0], 0, np.ones((1, 128)))),  # type: ignore[arg-type]
    (r"pool: got \[\], expected one of kv", lambda c, s: c.layer(0, [])),  # type: ignore[arg-type]
    ("device: got 'yes', expected True or False", lambda c, s: c.verify(device="yes")),  # type: ignore[arg-type]
)  # fmt: skip


@pytest.mark.parametrize(("message", "call"), CALLS, ids=[message[:32] for message, _ in CALLS])
def test_refuses(message: str, call: Call) -> None:
    if "in all" in message:  # the call forks a sequence
        made = cache()
        sequence, _ = made.allocate()
        with pytest.raises(ArgumentError, match=message):
            call(made, sequence)
        made.verify(device=True)
    else:
        refuses(call, ArgumentError, message)


@pytest.mark.parametrize("argument", ["num_pages", "page_size", "num_layers", "max_seqs", "max_pages", "max_tokens"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True, 2**31, [2]])
def test_sizes(argument: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"^{argument}: got"):
        cache(**{argument: value})


@pytest.mark.parametrize("argument", ["num_pages", "page_size", "num_layers", "max_seqs", "max_pages"])
def test_sizes_without_a_default(argument: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{argument}: got None"):
        cache(**{argument: None})


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.uint64])
def test_sizes_of_numpy(kind: Any) -> None:
    """Numbers of 8 bits overflow where Python's do not."""
    made = cache(num_pages=kind(100), page_size=kind(4), max_seqs=kind(100), max_pages=kind(100))
    sequence, _ = made.allocate()
    assert made.extend([sequence], 300).slots.tolist() == list(range(300))
    made.reserve(sequence, kind(100))
    assert made.stats().pages_reserved == 25
    made.verify(device=True)


@pytest.mark.parametrize("shape", [(2, 512), (4, 512), (0, 512)])
def test_other_tokens_than_those_of_the_step(shape: tuple[int, int]) -> None:
    """The error is about what the caller has passed, not about the step's slots."""
    made = cache({"kv": "fp16-nope", "indexer": "indexer"})
    step = made.extend([made.allocate()[0]], 3)
    with pytest.raises(ShapeError, match=rf"^latent\.shape\[0\]: got {shape[0]}, expected 3, the tokens of the step"):
        made.append(step, 0, np.ones(shape, np.float16))
    with pytest.raises(ShapeError, match=rf"^k\.shape\[0\]: got {shape[0]}, expected 3, the tokens of the step"):
        made.append_keys(step, 0, np.ones((shape[0], 128), ml_dtypes.bfloat16))
    with pytest.raises(ShapeError, match=r"^latent\.shape\[-1\]"):
        made.append(step, 0, np.ones((3, 500), np.float16))
    assert not made.layer(0).any()


@pytest.mark.parametrize("place", ["tpu", "cuda:", -1, 0.0, True, [0]])
def test_places(place: Any) -> None:
    with pytest.raises(ArgumentError, match=r'device: got .*, expected a CUDA ordinal, "cuda:N", "cpu" or None'):
        cache(device=place)


def test_a_gpu_that_is_not_there() -> None:
    ordinal = device.gpu_count()
    with pytest.raises(UnsupportedDeviceError, match=f"device {ordinal}: this process sees {ordinal} GPUs"):
        cache(device=ordinal)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_no_copies(copied: Any) -> None:
    with pytest.raises(ArgumentError, match="cache: got a copy or a pickle of it, expected the cache itself; it owns"):
        copied(cache())


def test_steps_and_statistics_may_be_copied() -> None:
    made = cache()
    step = made.extend([made.allocate()[0]], 2)
    kept = pickle.loads(pickle.dumps(copy.deepcopy(step)))
    made.extend([0], 1)
    assert kept.slots.tolist() == [0, 1]
    assert copy.copy(made.stats()) == made.stats()


# ---- Token ids of 64 bits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [5 + 2**32, 5 - 2**32, -5, 2**63 - 1, -(2**63)])
def test_tokens_are_not_cut_to_32_bits(other: int) -> None:
    made, prompt = cache(), [5, 6, 7, 8, 9]
    first, _ = made.allocate(prompt)
    made.extend([first], 5)
    made.commit(first, prompt)
    assert made.allocate([other, *prompt[1:]])[1] == 0
    assert made.allocate(prompt)[1] == 4


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", ">i8", "uint64", "int64"])
def test_equal_tokens_of_any_dtype_are_the_same(dtype: str) -> None:
    made, prompt = cache(), [5, 6, 7, 8, 9]
    first, _ = made.allocate(prompt)
    made.extend([first], 5)
    made.commit(first, np.array(prompt, dtype))
    assert made.allocate(np.array(prompt, dtype))[1] == 4
    assert made.allocate(range(5, 10))[1] == 4


def test_large_tokens_are_found() -> None:
    made, prompt = cache(), [2**63 - 1, -(2**63), 2**40, 7, 8]
    first, _ = made.allocate(prompt)
    made.extend([first], 5)
    made.commit(first, prompt)
    assert made.allocate(prompt)[1] == 4
    assert made.allocate(np.array([*prompt[:3], 7, 9]))[1] == 4
