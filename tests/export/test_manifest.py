"""The manifest: read again it says what the module does; earlier ones are still read."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from mla_cupy.errors import ArgumentError, MlaError
from mla_cupy.export import c_module
from mla_cupy.export.manifest import SCHEMA, Manifest, ReadFill, ReadLaunch, RefusedError, manifest
from mla_cupy.runtime.tensormap import TensorMapSpec
from tests.export import draws, modules, package
from tests.export.package import Call, Writer

KEPT = Path(__file__).with_name("manifest_schema1.json")
GPU = package.device("sm_90a", 132)


def read_again() -> Manifest:
    """The manifest of dense decode, by way of its text."""
    module = modules.decode()
    text = json.dumps(manifest(module, c_module.image_names(module)))
    return Manifest(json.loads(text))


def with_device(values: dict[str, Any]) -> dict[str, Any]:
    """The arguments, and what is read from the device."""
    device = {"sm_count": GPU.sm_count, "l2_bytes": GPU.l2_bytes, "total_memory": GPU.total_memory}
    return values | {f"device.{name}": value for name, value in device.items()}


def written(step: ReadLaunch | ReadFill, parameters: dict[str, list[int]]) -> bytes:
    """A step as the stub driver writes it down."""
    writer = Writer(parameters)
    if isinstance(step, ReadFill):
        writer.memset(step.address, 0, step.nbytes, package.STREAM)
        return writer.take()
    kernel = step.kernel
    attributes = [(4, kernel.cluster, 1, 1)] if kernel.cluster > 1 else []
    attributes += [(6, 1, 0, 0)] if step.dependent else []
    shape = (*step.grid, kernel.threads, 1, 1, kernel.shared_bytes)
    found = b"L" + kernel.entry.encode().ljust(96, b"\0")
    found += struct.pack("<7IQI", *shape, package.STREAM, len(attributes))
    found += b"".join(struct.pack("<4I", *attribute) for attribute in attributes)
    found += step.params[: parameters[kernel.entry][0]]
    maps = [writer.encode_tiled(TensorMapSpec(**each)) for each in step.maps]
    return found + b"".join(maps[: len(parameters[kernel.entry]) - 1])


def refusal(call: Call) -> MlaError | None:
    """Reason why the package refuses a call; None if it runs."""
    try:
        call.run(GPU)
    except MlaError as error:
        return error
    return None


def test_it_says_what_is_launched() -> None:
    found, module, rng = read_again(), modules.decode(), random.Random(37)
    parameters = package.parameters(module)
    with package.writing(parameters) as writer:
        for _ in range(200):
            values = draws.values(module.subject, rng, {"b": 500, "num_pages": 500, "max_pages": 500})
            call = Call(module.subject, values)
            error = refusal(call)
            if error:
                with pytest.raises(RefusedError) as refused:
                    found.steps("sm_90a", "call", with_device(values))
                assert (str(refused.value), refused.value.kind) == (str(error), type(error).__name__)
                continue
            steps = found.steps("sm_90a", "call", with_device(values))
            assert b"".join(written(step, parameters) for step in steps) == writer.take()
            assert found.workspace("sm_90a", "call", with_device(values)) == call.nbytes(GPU)


def test_bounds_are_rules() -> None:
    found, module = read_again(), modules.decode()
    values = with_device(draws.values(module.subject, random.Random(1), {}))
    with pytest.raises(RefusedError, match="b: got -1, expected 0 to 2147483647"):
        found.steps("sm_90a", "call", values | {"b": -1})


def test_an_earlier_manifest_is_read() -> None:
    """A manifest of `merge_states` with schema 1; its launch is known by hand."""
    found = Manifest.read(KEPT)
    shape = {"n": 3, "b": 2, "s_q": 1, "h_q": 16, "d": 512}
    values: dict[str, Any] = {**shape, "outs": 4096, "lses": 1 << 20, "out": 2 << 20, "lse": 3 << 20, "workspace": 0}
    values |= {f"outs_strides[{i}]": x for i, x in enumerate((16384, 8192, 8192, 512))}
    values |= {f"lses_strides[{i}]": x for i, x in enumerate((32, 16, 1, 1))}
    values |= {f"out_strides[{i}]": x for i, x in enumerate((8192, 8192, 512))}
    values |= {f"lse_strides[{i}]": x for i, x in enumerate((16, 1, 1))}
    values |= {"empty_lse": float("-inf"), "workspace_bytes": 0}
    (step,) = found.steps("sm_90a", "call", with_device(values))
    assert isinstance(step, ReadLaunch)
    assert (step.kernel.entry, step.grid, step.maps, step.dependent) == ("mla_merge_states", (32, 1, 1), (), True)
    assert struct.unpack_from("<4Q", step.params) == (4096, 1 << 20, 2 << 20, 3 << 20)
    assert struct.unpack_from("<5i", step.params, 4 * 8 + 14 * 8) == (3, 2, 1, 16, 512)


def test_later_schemas_are_refused() -> None:
    for schema in (0, SCHEMA + 1, None, "1"):
        with pytest.raises(ArgumentError, match=f"schema: got {schema}, expected 1"):
            Manifest({"schema": schema})
