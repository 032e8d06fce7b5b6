"""Pages of the repository on the site: a page that includes one gets its text, with links that work there.

A page of the site includes a page that lies elsewhere by

    ```{include} ../../cuda_src/decode/README.md
    ```

Its title is dropped if the page of the site has one. Links between such pages become links within the site, and links
to sources become downloads. MyST's own directive keeps links as they are, which lead nowhere from here.
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


def text_of(source: Path, page: Path, pages: dict[Path, Path]) -> str:
    """The text of a page of the repository, as it reads on a page of the site."""

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if not target:
            return match[0]
        path = (source.parent / target).resolve()
        found = pages.get(path, path)
        if path.is_dir():
            return text
        on_site = path in pages or DOCS in path.parents  # a download has no anchors
        return f"[{text}]({os.path.relpath(found, page.parent)}{anchor if on_site else ''})"

    text, pieces, end = source.read_text(), [], 0
    for fence in _FENCE.finditer(text):
        pieces += [_LINK.sub(link, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*pieces, _LINK.sub(link, text[end:])])


def _read(app: Any, docname: str, source: list[str]) -> None:
    page = Path(app.env.doc2path(docname))

    def replace(match: re.Match[str]) -> str:
        path = (page.parent / match[1]).resolve()
        app.env.note_dependency(str(path))
        text = text_of(path, page, included())
        return text if match.start() == 0 else _TITLE.sub("", text)

    source[0] = _INCLUDE.sub(replace, source[0])


def setup(app: Any) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("source-read", _read)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
