"""The site's own code: included pages, drawings, tables. The site itself is built by `.ci/run`."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from mla_cupy.ops import OPERATIONS

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"


def load(path: str) -> ModuleType:
    """A module of the site, which is no package: it imports what lies beside it."""
    spec = importlib.util.spec_from_file_location(f"docs_{Path(path).stem}", DOCS / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str((DOCS / path).parent))
        spec.loader.exec_module(module)
    return module


repository_pages = load("_ext/repository_pages.py")
kernel_choice = load("_ext/kernel_choice.py")
result_tables = load("_ext/result_tables.py")
forge_tables = load("_ext/forge_tables.py")
plain_pages = load("_ext/plain_pages.py") if importlib.util.find_spec("sphinx") else None
draw = load("drawings/draw.py")


def title_scores(query: str) -> dict[str, float]:
    """Scores by which the site's search sorts headings, by page; a page's own title has one more."""
    scores: dict[str, float] = {}
    for page in DOCS.rglob("*.md"):
        for number, heading in enumerate(re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)):
            if query in heading.lower() and len(query) >= len(heading) / 2:
                score = 15 * len(query) / len(heading) + (number == 0)
                name = page.relative_to(DOCS).as_posix()
                scores[name] = max(score, scores.get(name, 0))
    return scores


def test_a_search_finds_the_guide_first() -> None:
    scores = title_scores("paged cache")
    assert len(scores) > 2
    assert max(scores, key=lambda page: scores[page]) == "guides/paged-cache.md"
    assert scores["guides/paged-cache.md"] > 15, "a page that has both words somewhere gets 15"


def test_every_page_beside_sources_is_on_the_site() -> None:
    pages = set((REPOSITORY / "cuda_src").rglob("*.md"))
    assert pages - set(repository_pages.included()) == set()


def test_every_page_is_in_a_toctree() -> None:
    """Sphinx says so, too, but not in a test run."""
    listed = {"index"}
    for page in DOCS.rglob("*.md"):
        for body in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), re.DOTALL):
            for name in re.findall(r"^(?:.*<)?(\w[\w/-]*)>?$", body, re.MULTILINE):
                listed.add((page.parent / name).relative_to(DOCS).as_posix())
    found = {page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md")}
    assert found == listed


def test_links_of_included_pages(tmp_path: Path) -> None:
    for name, text in {
        "src/a.md": (
            "# A\n[b](deep/b.md#x) [c](c.cu) [log](log.md#y) [d](deep)\n[web](https://example.org) [own](#a)\n"
            "```\n[b](deep/b.md)\n```\n"
        ),
        "src/deep/b.md": "# B\n",
        "src/c.cu": "",
        "docs/one/a.md": "```{include} ../../src/a.md\n```\n",
        "docs/b.md": "```{include} ../src/deep/b.md\n```\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    pages = repository_pages.included(tmp_path / "docs")
    text = repository_pages.text_of(tmp_path / "src/a.md", tmp_path / "docs/one/a.md", pages)
    assert "[b](../b.md#x) [c](../../src/c.cu) [log](path:../../src/log.md) d\n" in text
    assert "[web](https://example.org) [own](#a)\n" in text
    assert "```\n[b](deep/b.md)\n```" in text


@pytest.mark.skipif(plain_pages is None, reason="needs Sphinx: the extra docs")
def test_the_list_for_programs() -> None:
    page = plain_pages.Page
    index = page("index", "mla_cupy", "# mla_cupy\n\nKernels for [MLA](mla.md): fast. More.\n")
    guide = page("guides/a", "A", "# A\n\n```text\nx\n```\n\n| a |\n|---|\n\nDo a\nthing. More.\n")
    assert plain_pages.listing([guide, index]) == (
        "# mla_cupy\n\n> Kernels for MLA\n\n## Start\n\n- [mla_cupy](index.md): Kernels for MLA\n"
        "\n## Guides\n\n- [A](guides/a.md): Do a thing.\n"
    )


@pytest.mark.parametrize("name", sorted(draw.DRAWINGS))
def test_drawings_are_up_to_date(name: str) -> None:
    """`python3 docs/drawings/draw.py` writes them."""
    text = (DOCS / "drawings" / f"{name}.svg").read_text()
    ElementTree.fromstring(text)
    assert text == draw.DRAWINGS[name]


def test_no_other_drawings() -> None:
    assert {path.stem for path in (DOCS / "drawings").glob("*.svg")} == set(draw.DRAWINGS)


def test_the_drawn_regions_of_tensor_memory_are_disjoint() -> None:
    for name, used, regions in draw.TENSOR_MEMORY:
        cells = [
            (column, half)
            for region in regions
            for column in range(region.start, region.end)
            for half in (("lower", "upper") if region.half == "all" else (region.half,))
        ]
        assert len(cells) == len(set(cells)), name
        columns = {column for column, _ in cells}
        assert len(columns) == used, name


def test_the_choice_of_kernels() -> None:
    hopper, untested, blackwell, ampere, ada, turing = kernel_choice.GPUS
    table = {label: (pipeline, problem) for label, pipeline, problem in kernel_choice.SITUATIONS}
    assert "sm90" in kernel_choice.chosen(*table["`mla_decode`, 128 heads"], hopper)
    assert "sm100" in kernel_choice.chosen(*table["`sparse_mla_backward`, 64 heads"], blackwell)
    assert kernel_choice.chosen(*table["`sparse_mla_backward`, 64 heads"], untested) == "`sparse_backward_mma`"
    assert kernel_choice.chosen(*table["`mla_decode`, 128 heads"], ampere) == "`attention_mma`"
    assert kernel_choice.chosen(*table["`mla_decode`, 128 heads"], ada) == "`attention_mma`"
    assert kernel_choice.chosen(*table["`mla_prefill`, 128 heads, keys of 192"], blackwell) == "`dense_mma`"
    assert kernel_choice.chosen(*table["`mla_prefill`, 128 heads, keys of 192"], ada) == "`dense_mma`"
    for label, call in table.items():
        plain = kernel_choice.chosen(*call, turing)
        if "math=" in label:  # products in FP8 are of Hopper alone
            assert plain == "none"
        else:
            assert "generic" in plain or plain in ("`indexer_topk_select`", "`projection_states`")


def test_the_table_has_every_kernel_that_a_call_may_get() -> None:
    """The table covers every kernel of operations with a choice, except those that run only by name."""
    shown = {kernel_choice.chosen(*call[1:], gpu) for call in kernel_choice.SITUATIONS for gpu in kernel_choice.GPUS}
    pipelines = {id(call[1]): call[1] for call in kernel_choice.SITUATIONS}
    for operation in OPERATIONS.values():
        assert id(operation.pipeline) in pipelines or len(operation.pipeline.kernels) == 1, operation.name
    for pipeline in pipelines.values():
        assert {f"`{kernel.name}`" for kernel in pipeline.kernels if not kernel.on_request} <= shown


KERNEL_PAGES = sorted((REPOSITORY / "cuda_src").rglob("*.md"))


@pytest.mark.parametrize("page", KERNEL_PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_kernel_pages_hold_the_present_design(page: Path) -> None:
    """Measurements and experiments belong to bench/log."""
    lines = page.read_text().splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120] == []


def test_the_changelog_is_short() -> None:
    """Features, new names and fixes, no figures: 100 lines for a release."""
    assert len((REPOSITORY / "CHANGELOG.md").read_text().splitlines()) <= 100


@pytest.mark.parametrize("tables", [result_tables, forge_tables], ids=["rows", "kernels and formats"])
def test_generated_pages_are_up_to_date(tables: ModuleType) -> None:
    """`python3 docs/_ext/result_tables.py` and `forge_tables.py` write them."""
    assert tables.PAGE.read_text() == tables.page()


def test_every_kept_result_is_cited() -> None:
    pages = [*DOCS.rglob("*.md"), *KERNEL_PAGES, *(REPOSITORY / "bench").rglob("*.md"), REPOSITORY / "README.md"]
    sources = [*(REPOSITORY / "mla_cupy").rglob("*.py"), *(REPOSITORY / "bench").rglob("*.py")]
    text = "\n".join(path.read_text() for path in (*pages, *sources))
    results = sorted((REPOSITORY / "bench" / "results").rglob("*.jsonl"))
    assert results
    assert [path.name for path in results if path.name not in text] == []
