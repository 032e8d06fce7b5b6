"""Install commands in error messages match setup.cfg, by NVIDIA's and CuPy's names."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest
from tiny_kernels import REPOSITORY

from mla_cupy.runtime import remedies


@pytest.mark.parametrize("extra", ["cu12", "cu13"])
def test_the_remedy_is_the_extra(extra: str) -> None:
    config = configparser.ConfigParser()
    config.read(REPOSITORY / "setup.cfg")
    wanted = config["options.extras_require"][extra].split()
    assert wanted
    for requirement in wanted:
        assert f'"{requirement}"' in remedies.INSTALL_CUPY


#: The package or the simulator by its name in an index: an installer's argument, or a name with extras. Paths to a
#: checkout or a wheel file do not match.
NAMED = re.compile(
    r"\b(?:pipx? (?:install|download|wheel|run)|uv (?:add|(?:pip|tool) install)|uvx|(?:conda|mamba) install|poetry add)"
    r"\b[^`\n&;]*(?<![\w./-])(?:mla[_-]cupy|ptxsim)(?![\w/-])"
    r"|(?<![\w./-])(?:mla[_-]cupy|ptxsim)\[[a-z]",
    re.IGNORECASE,
)
KINDS = {".py", ".pyi", ".md", ".rst", ".txt", ".cfg", ".toml", ".in", ".sh", ".c", ".h", ".cpp", ".rs", ".cu", ".cuh"}
#: Made by tools, or not ours.
ELSEWHERE = {"build", "dist", "target", "node_modules", "__pycache__", "results"}


def of_the_project(path: Path) -> bool:
    places = path.relative_to(REPOSITORY).parts
    hidden = any(place.startswith(".") for place in places if place not in (".ci", ".github"))
    return not hidden and not ELSEWHERE.intersection(places) and path != Path(__file__).resolve()


def test_nothing_names_this_package_to_an_index() -> None:
    """It is not published: somebody else may publish something by its name."""
    paths = [path for path in REPOSITORY.rglob("*") if path.suffix in KINDS and of_the_project(path)]
    paths += [path for path in (REPOSITORY / ".ci").glob("*") if path.is_file()]
    names = {path.relative_to(REPOSITORY).as_posix() for path in paths}
    assert {"README.md", "setup.cfg", "docs/guides/engines.md", "ptxsim/README.md", "ptxsim/setup.cfg"} <= names
    lines = [(path, line) for path in paths for line in path.read_text(errors="replace").splitlines()]
    assert [(path.name, line.strip()) for path, line in lines if NAMED.search(line)] == []


@pytest.mark.parametrize(
    "line",
    [
        "run pip install 'mla_cupy[cu12]'",
        'python3 -m pip install "mla_cupy[cu12]"  # or cu13',
        "pip install -U mla-cupy",
        "pip install ptxsim",
        "uv add ptxsim",
        "the extra ptxsim[cuda]",
        "    mla_cupy[torch]",
    ],
)
def test_what_names_it(line: str) -> None:
    assert NAMED.search(line)


@pytest.mark.parametrize(
    "line",
    [
        'python3 -m pip install -e ".[cu12]" && mla-cupy demo',
        "pip install ./ptxsim",
        "pip install './ptxsim[test]'",
        'python3 -m pip install "dist/mla_cupy-VERSION-py3-none-any.whl[cu12]"',
        'python3 -m pip install dist/ptxsim-VERSION-py3-none-any.whl "dist/mla_cupy-VERSION-py3-none-any.whl[cu12]"',
        "pip install matplotlib, or use --html",
    ],
)
def test_what_does_not(line: str) -> None:
    assert not NAMED.search(line)
