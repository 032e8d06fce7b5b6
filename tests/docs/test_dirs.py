"""Completion of a public module offers its public names."""

from __future__ import annotations

import importlib

import pytest

MODULES = {
    "cache": "",
    "compat.cudnn_dsa": "torch",
    "compat.flash_mla": "",
    "compat.flash_mla_fp8": "",
    "compat.megatron": "torch",
    "compat.xtuner": "torch",
    "jax": "jax",
    "parallel": "",
    "reference": "",
    "torch": "torch",
}


@pytest.mark.parametrize(("name", "library"), MODULES.items())
def test_dir_is_public(name: str, library: str) -> None:
    if library:
        pytest.importorskip(library)
    module = importlib.import_module(f"mla_cupy.{name}")
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, each) for each in module.__all__)
