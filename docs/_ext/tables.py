"""Directives that compute a Markdown text, in place of tables that a person would have to keep up to date."""

from __future__ import annotations

from typing import ClassVar

from docutils import nodes
from docutils.statemachine import StringList
from result_tables import table
from sphinx.util.docutils import SphinxDirective

__all__ = ["MarkdownDirective", "table"]


class MarkdownDirective(SphinxDirective):
    """A directive whose content is computed: `markdown` returns it."""

    has_content = False
    option_spec: ClassVar[dict[str, object]] = {}

    def markdown(self) -> str:
        """Markdown that takes the place of the directive."""
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        """Return the nodes for docutils."""
        node = nodes.Element()
        lines = StringList(self.markdown().splitlines(), self.get_source_info()[0])
        self.state.nested_parse(lines, self.content_offset, node)
        return node.children
