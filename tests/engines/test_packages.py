"""The plugins against the sources of the engines, where these have been fetched."""

from __future__ import annotations

import pytest

from tests.engines import packages, records
from tests.engines.compare import compare
from tests.engines.versions import VERSIONS, pinned

pytestmark = pytest.mark.slow  # parsing an engine takes seconds


@pytest.mark.parametrize(("engine", "version"), [(engine, x) for engine in VERSIONS for x in pinned(engine)])
def test_the_plugin_fits(engine: str, version: str) -> None:
    if version not in packages.there(engine):
        pytest.skip(f"{engine} {version} not fetched: python -m tests.engines fetch")
    assert compare(engine, packages.package(engine, version)) == []


@pytest.mark.parametrize("engine", VERSIONS)
def test_the_record_is_what_the_packages_say(engine: str) -> None:
    if packages.there(engine) != list(VERSIONS[engine]):
        pytest.skip(f"some versions of {engine} not fetched: python -m tests.engines fetch --versions all")
    assert records.text_of(engine) == (records.FOLDER / f"{engine}.json").read_text()
