"""Markdown copies of the pages in the built site, and `llms.txt`, which lists them: the site for programs.

A copy has the address of its page, with `.md` in place of `.html`. Included pages and generated tables are in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from docutils.parsers.rst import directives
from repository_pages import DOCS, page_text
from tables import MarkdownDirective

_DIRECTIVE = re.compile(r"^```\{([\w-]+)\}[ ]*(.*)\n```$", re.MULTILINE)
_FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n+", re.DOTALL)
_FENCED = re.compile(r"^(```+|:::+).*?^\1$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_SENTENCE = re.compile(r".*?[.:](?=\s|$)")
SECTIONS = {"": "Start", "guides": "Guides", "tutorials": "Tutorials", "reference": "Reference", "kernels": "Kernels"}
"""Headings of `llms.txt` by folder; other folders have their own names."""


class Page(NamedTuple):
    """A page by its place below `docs`, without the suffix."""

    name: str
    title: str
    text: str


def expanded(text: str) -> str:
    """Replace directives that compute Markdown by their tables."""

    def table(match: re.Match[str]) -> str:
        kind = directives._directives.get(match[1])  # type: ignore[attr-defined]
        if kind is None or not issubclass(kind, MarkdownDirective):
            return match[0]
        directive = kind.__new__(kind)
        directive.arguments = match[2].split()
        return str(directive.markdown())

    return _DIRECTIVE.sub(table, text)


def summary(text: str) -> str:
    """First sentence of the first paragraph; "" if there is none."""
    prose = _FENCED.sub("", _FRONT_MATTER.sub("", text))
    paragraphs = (part.strip() for part in prose.split("\n\n"))
    first = next((part for part in paragraphs if part and part[0] not in "#|!<(-:"), "")
    flat = _LINK.sub(r"\1", " ".join(first.split()))
    found = _SENTENCE.match(flat)
    return found[0].rstrip(":") if found else flat


def listing(pages: Iterable[Page]) -> str:
    """Write `llms.txt`: the project in a sentence, then each page with its title and first sentence."""
    by_folder: dict[str, list[Page]] = {}
    for page in pages:
        by_folder.setdefault(page.name.rpartition("/")[0], []).append(page)
    start = by_folder[""]
    lines = ["# mla_cupy", "", *(f"> {summary(page.text)}" for page in start if page.name == "index")]
    for folder in sorted(by_folder, key=[*SECTIONS, *sorted(by_folder.keys() - SECTIONS)].index):
        lines += ["", f"## {SECTIONS.get(folder, folder.capitalize())}", ""]
        for page in by_folder[folder]:
            about = summary(page.text)
            lines.append(f"- [{page.title}]({page.name}.md)" + (f": {about}" if about else ""))
    return "\n".join(lines) + "\n"


def pages_of(titles: Mapping[str, str]) -> list[Page]:
    """The Markdown pages of the site, in the order of their names; `titles` are by name."""
    names = sorted(name for name in titles if (DOCS / f"{name}.md").exists())
    return [Page(name, titles[name], expanded(page_text(DOCS / f"{name}.md"))) for name in names]


def _write(app: Any, error: Exception | None) -> None:
    if error or app.builder.format != "html":
        return
    pages = pages_of({name: node.astext() for name, node in app.env.titles.items()})
    for page in pages:
        copy = Path(app.outdir) / f"{page.name}.md"
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(_FRONT_MATTER.sub("", page.text).replace("](path:", "]("))
    (Path(app.outdir) / "llms.txt").write_text(listing(pages))


def setup(app: Any) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("build-finished", _write)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
