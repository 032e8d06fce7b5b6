"""Environments with anything in them: `info` answers, and the others work or say what is wrong."""

from __future__ import annotations

import os
import random
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from mla_cupy import cli, kernels
from mla_cupy.runtime import cache, env, loader, worker

NAMES = (
    *(variable.full_name for variable in env.VARIABLES.values()),
    "MLA_CUPY_CACHEDIR",
    "MLA_CUPY_",
    "XDG_CACHE_HOME",
    "NVRTC_APPEND_FLAGS",
    "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES",
)
TEXTS = (
    *("", " ", "0", "1", "2", "off", "lazy", "import", "foo", "auto", "cuda", "~", ".", "..", "-1"),
    *("/proc/nowhere", "/dev/null", "/proc", "/proc/self/mem", "/proc/self/fd", "a" * 5000, "a/" * 3000),
    *("\udcff\udcfe", "[/x]", "[bold]", ":smile:", "x\ny", "\x1b[31m", "\u221e", "{}", "%s", "'", '"'),
)
PLACES = ("file", "fifo", "loop", "dangling", "open", "closed", "fresh/deeper", "link")


@pytest.fixture
def places(registry: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Files and directories of all kinds; relative paths are relative to it."""
    root = registry / "places" / "here"
    root.mkdir(parents=True)
    (root / "file").write_text("text")
    os.mkfifo(root / "fifo")
    (root / "loop").symlink_to("loop")
    (root / "dangling").symlink_to("nothing")
    (root / "open").mkdir()
    (root / "open").chmod(0o777)
    (root / "closed").mkdir(mode=0o000)
    (root / "link").symlink_to("open")
    monkeypatch.chdir(root)
    monkeypatch.setenv("HOME", str(root))  # nothing here may clear the cache of the one who runs the tests
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the cache says what is wrong with it: here it is expected
        yield root
    (root / "closed").chmod(0o700)


def environment(rng: random.Random, root: Path) -> dict[str, str]:
    """Some variables, with texts or paths."""
    return {
        name: str(root / rng.choice(PLACES)) if rng.random() < 0.4 else rng.choice(TEXTS)
        for name in rng.sample(NAMES, rng.randint(1, 4))
    }


def fuzz(root: Path, seed: int, turns: int) -> None:
    tiny = kernels.KERNELS["copy"]
    request = tiny.request(tiny.variants[0], "sm_75")
    for turn in range(turns):
        chosen = environment(random.Random(f"{seed} {turn}"), root)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in chosen.items():
                patch.setenv(name, value)
            patch.setattr(tempfile, "tempdir", str(root / "fresh-tmp") if turn % 2 else "/proc/nowhere")
            (root / "fresh-tmp").mkdir(exist_ok=True)
            patch.setattr(worker, "Worker", lambda *_, **__: None)  # what is compiled is not the question
            try:
                assert cli.main(["info"]) == 0
                assert cli.main(["info", "--json"]) == 0
                assert cli.main(["list", "--arch", "sm_75,sm_90a"]) in (0, 1, 2)
                assert cli.main(["clear-cache"]) in (0, 1, 2)
                worker.start([request])
                cache.find_places()
            except BaseException as error:
                raise AssertionError(f"seed {seed}, turn {turn}: {chosen}") from error
        worker._background.clear()
        loader.forget()


def test_fuzz(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fuzz(places, seed=1, turns=30)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 10))
def test_fuzz_long(places: Path, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    fuzz(places, seed, turns=200)
