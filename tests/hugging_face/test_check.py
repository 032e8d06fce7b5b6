"""`mla-cupy transformers check`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mla_cupy import cli
from mla_cupy.transformers.families import DECLINED, FAMILIES

from . import models


def test_all_model_types(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["transformers", "check", "all", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == [*FAMILIES, *DECLINED]
    assert len(found) == 15
    served = {name: {answer["use"]: answer["served"] for answer in answers} for name, answers in found.items()}
    assert all(served[name]["decode"] for name in FAMILIES)
    assert [name for name in FAMILIES if not served[name]["prefill and training"]] == ["minicpm3"]
    for name, reason in DECLINED.items():
        assert served[name] == {"all": False}
        assert reason in found[name][0]["how"]


def test_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models.config_of("glm4_moe_lite").save_pretrained(tmp_path)
    assert cli.main(["transformers", "check", str(tmp_path)]) == 0
    assert "heads of 256 and 256 columns" in capsys.readouterr().out


def test_what_is_not_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers.CONFIG_MAPPING["llama"]().save_pretrained(tmp_path)
    assert cli.main(["transformers", "check", str(tmp_path)]) == 1
    assert "got 'llama', expected one of axk1" in " ".join(capsys.readouterr().out.split())
