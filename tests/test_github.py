"""Files for GitHub alone: workflows and forms are well-formed, and the address is in one place."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mla_cupy._version import __version__

REPOSITORY = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (REPOSITORY / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
FIELDS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}
PLACEHOLDER = "example.invalid"


def read(path: Path) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows(path: Path) -> None:
    workflow = read(path)
    assert {"name", True, "permissions", "jobs"} <= set(workflow)  # YAML 1.1 reads `on` as true
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert {"runs-on", "timeout-minutes", "steps"} <= set(job)
        assert {job.get("needs", "")} <= {"", *workflow["jobs"]}
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            assert re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", step.get("uses", "a/b@v1"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_shell_of_workflows_parses(path: Path) -> None:
    for job in read(path)["jobs"].values():
        for step in job["steps"]:
            script = re.sub(r"\$\{\{.*?\}\}", "x", step.get("run", ""))
            assert subprocess.run(["bash", "-n", "-c", script], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms(path: Path) -> None:
    form = read(path)
    assert set(form) == {"name", "description", "labels", "body"}
    named = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in form["body"]} <= FIELDS
    assert len({field["id"] for field in named}) == len(named)
    assert all(field["attributes"]["label"] for field in named)


def test_nightly_runs_every_folder_once() -> None:
    (job,) = read(REPOSITORY / ".github/workflows/nightly.yml")["jobs"].values()
    *parts, others = job["strategy"]["matrix"]["part"]
    assert others == "others"
    assert all((REPOSITORY / "tests" / part).is_dir() for part in parts)
    assert f'folders="{" ".join(parts)}"' in job["steps"][-1]["run"]


def test_the_citation_has_the_version() -> None:
    assert read(REPOSITORY / "CITATION.cff")["version"] == __version__


def test_the_address_is_in_one_place() -> None:
    here = Path(__file__).name
    suffixes = {".md", ".cfg", ".yml", ".cff", ".toml", ".py"}
    skipped = {".git", "build", "__pycache__"}
    named = {
        path.relative_to(REPOSITORY).as_posix()
        for path in REPOSITORY.rglob("*")
        if path.suffix in suffixes and not skipped & set(path.parts) and path.name != here
        if PLACEHOLDER in path.read_text(encoding="utf-8", errors="replace")
    }
    assert named == {"setup.cfg"}
