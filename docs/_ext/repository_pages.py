"""Pages of the repository on the site: a page that includes one gets its text, with links that work there.

A page of the site includes a page that lies elsewhere by

    ```{include} ../../cuda_src/decode/README.md
    ```

Its title is dropped if the page of the site has one. Links between such pages become links within the site; links to
other files of the repository become downloads. MyST's own directive keeps links as they are, which lead nowhere from
here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
REPOSITORY = DOCS.parent
_INCLUDE = re.compile(r"^```\{include\} (\S+)\n```$", re.MULTILINE)
_LINK = re.compile(r"(?<!\!)\[([^\]]*)\]\(([^)#\s:]*)(#[^)\s]*)?\)")
_TITLE = re.compile(r"\A# .*\n")
_FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2$", re.MULTILINE | re.DOTALL)


def included(docs: Path = DOCS) -> dict[Path, Path]:
    """Every page of the repository that the site includes, and the page that includes it."""
    return {
        (page.parent / target).resolve(): page
        for page in sorted(docs.rglob("*.md"))
        for target in _INCLUDE.findall(page.read_text())
    }


def address(path: Path, anchor: str, page: Path, pages: dict[Path, Path]) -> str:
    """Link from a page of the site to a file of the repository."""
    target = os.path.relpath(pages.get(path, path), page.parent)
    if path in pages or DOCS in path.parents:
        return target + anchor
    return f"path:{target}" if path.suffix == ".md" else target  # MyST takes other links to .md for pages of the site


def text_of(source: Path, page: Path, pages: dict[Path, Path]) -> str:
    """Text of a page of the repository, with links that work on a page of the site."""

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if not target:
            return match[0]
        path = (source.parent / target).resolve()
        return text if path.is_dir() else f"[{text}]({address(path, anchor, page, pages)})"

    text, pieces, end = source.read_text(), [], 0
    for fence in _FENCE.finditer(text):
        pieces += [_LINK.sub(link, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*pieces, _LINK.sub(link, text[end:])])


def page_text(page: Path, pages: dict[Path, Path] | None = None) -> str:
    """Text of a page of the site, with the pages that it includes."""
    pages = included() if pages is None else pages

    def replace(match: re.Match[str]) -> str:
        text = text_of((page.parent / match[1]).resolve(), page, pages)
        return text if match.start() == 0 else _TITLE.sub("", text)

    return _INCLUDE.sub(replace, text_of(page, page, pages))


def _read(app: Any, docname: str, source: list[str]) -> None:
    page = Path(app.env.doc2path(docname))
    if page.suffix == ".md":
        for target in _INCLUDE.findall(source[0]):
            app.env.note_dependency(str((page.parent / target).resolve()))
        source[0] = page_text(page)


def setup(app: Any) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("source-read", _read)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
