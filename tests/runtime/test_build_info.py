"""Records that fit their files' digests, and are wrong all the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_kernels import TINY_REQUEST, tiny_build

from mla_cupy.runtime import build_info, cache, loader, nvrtc
from mla_cupy.runtime.build import compile_kernel

WRONG: dict[str, tuple[Any, ...]] = {
    "entry": (None, 3, "mla_other", ["mla_tiny"]),
    "name": (None, 3),
    "nvrtc": (None, 12.9),
    "image_key": (None, 7, []),
    "registers": (None, "12", -1, True, 3.0),
    "static_smem": (None, "0", []),
    "seconds": (None, "fast", float("nan"), float("inf"), -1, 10**400),
    "options": (None, "-a", [1], {}),
    "notes": (None, "x", [None]),
    "defines": (None, [["MLA_FACTOR"]], [["a", 1]], "MLA_FACTOR"),
    "facts": (None, [], {}, {"threads": "128"}, {"threads": 64, "smem_bytes": 2048, "offsets": [0, -8, 16]}),
    "sha256": (None, "x", {}),
}
TEXTS = {
    "nested": "[" * 100_000,
    "nested objects": '{"a":' * 100_000,
    "a list": "[]",
    "a number": "1" * 5000,
    "nothing": "",
    "not text": "\udcff",
    "null": "null",
}


@pytest.fixture
def entry(fresh: Path) -> Path:
    path = cache.places().read[0] / cache.entry_name(TINY_REQUEST, nvrtc.find_nvrtc())
    cache.write(path, tiny_build(), cache.image_key(TINY_REQUEST))
    return path


def assert_built_again(entry: Path) -> None:
    assert cache.read(entry) is None
    loader.forget()
    assert loader.obtain(TINY_REQUEST).facts == tiny_build().facts
    assert cache.read(entry) is not None


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_field_is_built_again(entry: Path, field: str) -> None:
    path = entry / "info.json"
    sound = json.loads(path.read_text())
    for value in WRONG[field]:
        path.write_text(json.dumps({**sound, field: value}))
        assert cache.read(entry) is None, value
    del sound[field]
    path.write_text(json.dumps(sound))
    assert_built_again(entry)


@pytest.mark.parametrize("text", TEXTS)
def test_info_of_other_text_is_built_again(entry: Path, text: str) -> None:
    (entry / "info.json").write_bytes(TEXTS[text].encode("utf-8", "surrogateescape"))
    assert_built_again(entry)


def test_an_entry_under_the_name_of_another_is_built_again(entry: Path) -> None:
    """A sound build, but of something else."""
    path = entry / "info.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "image_key": "another"}))
    loader.forget()
    assert loader.obtain(TINY_REQUEST).entry == "mla_tiny"
    found = cache.read(entry)
    assert found is not None
    assert found.info["image_key"] == cache.image_key(TINY_REQUEST)


@pytest.mark.parametrize(
    "harm",
    [
        lambda cubin: b"",
        lambda cubin: cubin[:100],
        lambda cubin: cubin[: len(cubin) // 2],
        lambda cubin: b"PK" + cubin[2:],
    ],
)
def test_a_broken_cubin_is_no_entry(cuda_src: Path, harm: Callable[[bytes], bytes]) -> None:
    made = tiny_build()
    whole = {**made.info, "image_key": "key"}
    assert build_info.problem(whole, made.cubin, made.ptx) == ""
    assert build_info.problem(whole, harm(made.cubin), made.ptx) != ""


def test_ptx_alone_is_that_of_a_virtual_target(cuda_src: Path) -> None:
    """A build without an image is never used as one that the driver can load, nor the other way round."""
    whole, virtual = tiny_build(), compile_kernel(TINY_REQUEST.as_virtual())
    assert build_info.problem({**virtual.info, "image_key": "key"}, b"", virtual.ptx) == ""
    for info, cubin in ((whole.info, b""), (virtual.info, whole.cubin)):
        assert "cubin" in build_info.problem({**info, "image_key": "key"}, cubin, whole.ptx)
    other = virtual.ptx.replace(b"mla_fact_threads = 128", b"mla_fact_threads = 64")
    assert build_info.problem({**virtual.info, "image_key": "key"}, b"", other) != ""
