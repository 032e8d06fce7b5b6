"""The command `mla-cupy export`."""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mla_cupy.compiling import compile_all
from mla_cupy.errors import ArgumentError, KernelCompileError, MlaError, explain
from mla_cupy.export import c_module, interface, manifest, module, rust, xla
from mla_cupy.export.module import Module
from mla_cupy.export.numbers import CannotRecordError
from mla_cupy.export.operations import OPERATIONS, exported, subject_of
from mla_cupy.export.record import Target
from mla_cupy.runtime.build import Build, BuildRequest
from mla_cupy.terminal import path, show, table

_PREFIX = re.compile(r"[a-z][a-z0-9_]*")
_INTEGERS = {
    "h_q": "query heads",
    "h_kv": "KV heads (default: h_q)",
    "s_q": "query tokens of each sequence (default: 1)",
    "d_qk": "width of the keys: 576 or 512 (default: 576, or the record's)",
    "page_size": "tokens of a page",
    "topk": "selected tokens of each query",
    "d_index": "width of the indexer's keys (default: 128)",
    "d_head": "width of a head's values, or of its queries without RoPE (default: 128)",
    "window": "tokens that a query sees at most (default: all)",
    "theta": "base of RoPE, in place of cos and sin",
}
_FURTHER: dict[str, tuple[str, Callable[[Mapping[str, Any]], dict[str, str]]]] = {
    "rust": ("bindings for Rust", lambda told: {f"{told['name']}.rs": rust.bindings(told)}),
    "xla": ("a handler of XLA's foreign function interface", lambda told: {f"{told['name']}_xla.c": xla.source(told)}),
}
"""Files that are written on request, from the manifest."""
_TEXTS = {
    "dtype": "of queries and 16-bit caches: bfloat16 (default) or float16; with --math fp8 or fp8x2 also float8_e4m3fn",
    "kv_format": "FP8 format of the cache, such as v32; default: 16-bit rows",
    "out_dtype": "of the result: the dtype (default), or float32; of both decodes and mla_prepare also float8_e4m3fn",
    "math": "exact (default), fp8 for FP8 matmuls, or for dense decode fp8x2 (two e4m3 terms per number)",
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's options."""
    command.add_argument("--op", required=True, metavar="NAME", help="operation: " + ", ".join(OPERATIONS))
    for name, says in _INTEGERS.items():
        command.add_argument("--" + name.replace("_", "-"), type=int, metavar="N", help=says)
    for name, says in _TEXTS.items():
        command.add_argument("--" + name.replace("_", "-"), metavar="NAME", help=says)
    command.add_argument(
        "--with",
        dest="arrays",
        action="append",
        default=[],
        metavar="ARRAY",
        help="an optional input that calls have, such as attn_sink; may be given several times",
    )
    command.add_argument("--out", type=path, required=True, metavar="DIR", help="where the files go; it is made")
    command.add_argument("--prefix", default="mla_", help="of the names of functions and files (default: mla_)")
    for name, (says, _) in _FURTHER.items():
        command.add_argument(f"--{name}", action="store_true", help=f"{says}, too")
    command.add_argument("--ptx", action="store_true", help="PTX in place of machine code: for the simulator")


def run(options: argparse.Namespace, archs: Sequence[str], jobs: int) -> int:
    """Export; returns the exit status."""
    if not _PREFIX.fullmatch(options.prefix):
        raise ArgumentError(explain("--prefix", repr(options.prefix), "lower-case letters, digits and underscores"))
    given = {name: getattr(options, name) for name in (*_INTEGERS, *_TEXTS)}
    subject, operation = subject_of(options.op, given, options.arrays), exported(options.op)
    targets = tuple(_recorded(operation.record, subject, arch) for arch in archs)
    builds = _compiled([request for *_, request in module.requests(targets)], jobs, quiet=options.json)
    made = module.built(options.prefix, subject, targets, builds.__getitem__, ptx=options.ptx)
    paths = write(made, options.out, [name for name in _FURTHER if getattr(options, name)])
    if options.json:
        print(json.dumps({"files": [str(path) for path in paths], "kernels": _rows(made)}, indent=1))
        return 0
    heads = ("kernel", "variant", "target", "image bytes")
    show(table("kernels", heads, ([row[key] for key in row] for row in _rows(made))))
    size = sum(len(image) for image in {kernel.image for kernel in made.kernels})
    print(f"Written: {', '.join(map(str, paths))}; {size} bytes of images.")
    return 0


def texts(made: Module, further: Sequence[str] = ()) -> dict[str, str]:
    """The files of a module: name -> text. `further` are "rust" and "xla"."""
    name = made.name
    told = manifest.manifest(made, c_module.image_names(made))
    found = {
        f"{name}.h": interface.header(made, c_module.banner(made, "Interface")),
        f"{name}.c": c_module.source(made),
        f"{name}_images.c": c_module.images(made),
        f"{name}.json": json.dumps(told, separators=(",", ":")) + "\n",
    }
    for each in further:
        found |= _FURTHER[each][1](told)
    return found


def write(made: Module, folder: Path, further: Sequence[str] = ()) -> list[Path]:
    """Write the files of a module into a folder, which is made: all of them or none.

    They are written under other names and renamed, so that a link in the folder is replaced and not followed.

    Raises
    ------
    OSError
        If a file cannot be written; the folder then holds what it held before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    unique = uuid.uuid4().hex
    written = texts(made, further)
    fresh = {folder / name: folder / f".{name}.{unique}" for name in written}
    try:
        for (final, temporary), text in zip(fresh.items(), written.values(), strict=True):
            if final.is_dir() and not final.is_symlink():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(final))
            temporary.write_text(text)
        for final, temporary in fresh.items():
            temporary.replace(final)
    finally:
        for temporary in fresh.values():
            temporary.unlink(missing_ok=True)
    return [*fresh]


def _recorded(record: Any, subject: Any, arch: str) -> Target:
    """Record an operation for a target. What a fallback is slow at is not said here: nothing is called."""
    logger = logging.getLogger("mla_cupy")
    before, logger.disabled = logger.disabled, True
    try:
        target: Target = record(subject, arch).target
    except CannotRecordError as error:
        raise MlaError(f"{subject.operation.name} cannot be exported with these options: {error}") from error
    finally:
        logger.disabled = before
    return target


def _compiled(requests: Sequence[BuildRequest], jobs: int, *, quiet: bool) -> dict[BuildRequest, Build]:
    """The builds of the kernels, from the cache or made now."""
    builds: dict[BuildRequest, Build] = {}
    for outcome in compile_all(requests, jobs, quiet=quiet):
        if outcome.build is None:
            raise KernelCompileError(outcome.error)
        builds[outcome.request] = outcome.build
    return builds


def _rows(made: Module) -> list[dict[str, Any]]:
    return [
        {
            "kernel": kernel.spec.name,
            "variant": str(kernel.variant),
            "target": made.targets[kernel.target].arch,
            "bytes": len(kernel.image),
        }
        for kernel in made.kernels
    ]
