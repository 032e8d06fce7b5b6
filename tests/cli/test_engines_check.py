"""`mla-cupy engines check` on stand-ins of the engines: what it prints, and when it fails."""

from __future__ import annotations

import importlib.metadata
import json

import pytest

from mla_cupy import cli
from mla_cupy.integrations import check, versions

INSTALLED: dict[str, str] = {}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `importlib.metadata` report the engines in INSTALLED."""

    def version(name: str) -> str:
        if name not in INSTALLED:
            raise importlib.metadata.PackageNotFoundError(name)
        return INSTALLED[name]

    monkeypatch.setattr(check.importlib.metadata, "version", version)
    monkeypatch.setattr(
        check, "PROBES", {"vllm": {"CUSTOM": lambda: "", "FLASHMLA_SPARSE": lambda: ""}, "sglang": {"mla_cupy": broken}}
    )
    INSTALLED.clear()


def broken() -> str:
    raise OSError("no libcudart")


def told(capsys: pytest.CaptureFixture[str], status: int) -> list[dict[str, str]]:
    assert cli.main(["engines", "check", "--json"]) == status
    found: list[dict[str, str]] = json.loads(capsys.readouterr().out)
    return found


def test_no_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert [row["found"] for row in told(capsys, 1)] == ["not installed"] * 2


def test_an_engine_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    INSTALLED["vllm"] = versions.VERSIONS["vllm"][-1]
    rows = told(capsys, 0)
    assert [(row["backend"], row["tried"], row["found"]) for row in rows] == [
        ("CUSTOM", "yes", "fits"),
        ("FLASHMLA_SPARSE", "yes", "fits"),
        ("-", "-", "not installed"),
    ]
    assert cli.main(["engines", "check"]) == 0
    assert "FLASHMLA_SPARSE" in capsys.readouterr().out


def test_an_engine_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Declined in words, or unable to import in whatever way; a version that nobody has tried."""
    INSTALLED.update(vllm="9.0", sglang=versions.VERSIONS["sglang"][0])
    monkeypatch.setitem(check.PROBES["vllm"], "CUSTOM", lambda: "MLACommonImpl has no forward_mqa")
    rows = told(capsys, 1)
    assert [row["found"] for row in rows] == ["MLACommonImpl has no forward_mqa", "fits", "OSError: no libcudart"]
    assert rows[0]["tried"].startswith("no: 0.24.0 to ")


def test_wrong_usage() -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["engines", "fly"])
    assert caught.value.code == 2
