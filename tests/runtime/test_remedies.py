"""What error messages say to install: what setup.cfg asks for, by names that are NVIDIA's and CuPy's."""

from __future__ import annotations

import configparser
import re

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


def test_no_message_names_this_package_to_an_index() -> None:
    """It is not published: somebody else may publish something by its name."""
    named = re.compile(r"pip install[^`\n&]*\bmla[_-]cupy\b")
    texts = {
        path: path.read_text()
        for folder in ("mla_cupy", "bench", "examples", "ptxsim/ptxsim")
        for path in (REPOSITORY / folder).rglob("*.py")
    }
    texts[REPOSITORY / "README.md"] = (REPOSITORY / "README.md").read_text()
    assert [path for path, text in texts.items() if named.search(text)] == []
    assert named.search("run pip install 'mla_cupy[cu12]'")
