"""Docstrings of the bindings: those of the public functions, in sections, with other words for arrays and results."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

WIDTH = 116
"""Columns of a docstring, without the indentation."""


@dataclass(frozen=True)
class Field:
    """An entry of "Parameters" or "Returns": the names, their type, the text below."""

    names: tuple[str, ...]
    kind: str
    text: str = ""

    def lines(self) -> list[str]:
        """Lines as numpydoc writes them; paragraphs are filled."""
        head = ", ".join(self.names) + f" : {self.kind}" * bool(self.kind)
        filled = (
            textwrap.fill(part, WIDTH - 4, break_long_words=False, break_on_hyphens=False) for part in self.paragraphs()
        )
        return [head, *textwrap.indent("\n\n".join(filled), "    ").split("\n")]

    def paragraphs(self) -> list[str]:
        """The text's, each on one line."""
        return paragraphs(self.text)


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a text, each on one line."""
    return [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]


@dataclass(frozen=True)
class Docstring:
    """A docstring in sections; `about` is all that stands before "Parameters", `raises` a section's text as it is."""

    about: str
    parameters: tuple[Field, ...] = ()
    returns: tuple[Field, ...] = ()
    raises: str = ""
    notes: str = ""
    examples: str = ""

    def text(self) -> str:
        """The whole, without quotes, to be indented."""
        parts = [self.about]
        for title, fields in (("Parameters", self.parameters), ("Returns", self.returns)):
            if fields:
                lines = [line for one in fields for line in one.lines()]
                parts.append(_section(title, "\n".join(line for line in lines if line.strip())))
        for title, text in (("Raises", self.raises), ("Notes", self.notes), ("Examples", self.examples)):
            if text:
                parts.append(_section(title, text))
        return "\n\n".join(parts)


def _section(title: str, text: str) -> str:
    return f"{title}\n{'-' * len(title)}\n{text}"


def read(function: Callable[..., object]) -> Docstring:
    """A public function's docstring."""
    text = inspect.getdoc(function)
    assert text is not None
    parts = re.split(r"^([A-Z]\w+)\n-+\n", text, flags=re.MULTILINE)
    sections = {title: body.strip("\n") for title, body in zip(parts[1::2], parts[2::2], strict=True)}
    return Docstring(
        parts[0].strip(),
        tuple(_fields(sections.get("Parameters", ""))),
        tuple(_fields(sections.get("Returns", ""))),
        sections.get("Raises", ""),
    )


def _fields(section: str) -> Iterable[Field]:
    for entry in re.split(r"^(?=\S)", section, flags=re.MULTILINE):
        if entry.strip():
            head, _, text = entry.partition("\n")
            names, _, kind = head.partition(" : ")
            # A result without a name is a type alone.
            named = bool(kind) or re.fullmatch(r"\w+(, \w+)+", head)
            yield Field(tuple(names.split(", ")), kind, text) if named else Field((), head, text)


@dataclass(frozen=True)
class Words:
    """Words of a binding that differ from those of the public functions.

    Attributes
    ----------
    array : str
        What its arrays are called.
    left_out : tuple of str
        Parameters that it has not.
    others : mapping
        Further patterns, and what takes their place.
    donated : bool
        Whether arrays for results give them their memory.
    """

    array: str
    left_out: tuple[str, ...]
    others: Mapping[str, str]
    donated: bool = False


_DONATED = ("Whose memory the result takes over.", "Whose memory the results take over.")
_NOT_HERE = (
    re.compile(r"\s*Not for JAX, whose arrays cannot be written(?:: [^.]*`[\w.]+`[^.]*)?\."),
    re.compile(r"Of the caller's library(?:\.|; )"),
)


def adapted(docstring: Docstring, words: Words, results: Collection[str]) -> Docstring:
    """A docstring in a binding's words; `results` are the arrays for results."""
    parameters = []
    for one in docstring.parameters:
        names = tuple(name for name in one.names if name not in words.left_out)
        if names:
            donated = words.donated and set(names) <= set(results)
            text = _DONATED[len(names) > 1] if donated else one.text
            parameters.append(in_words(replace(one, names=names, text=text), words))
    returns = tuple(_named_or_type(in_words(one, words)) for one in docstring.returns)
    return replace(docstring, parameters=tuple(parameters), returns=returns)


def _named_or_type(one: Field) -> Field:
    return one if one.names else replace(one, names=(one.kind,), kind="")


def in_words(one: Field, words: Words) -> Field:
    """A field with a binding's word for arrays, and without what does not concern it."""
    plain = text = "\n\n".join(paragraphs(one.text))
    for unfit in _NOT_HERE:
        text = unfit.sub("", text)
    kind = one.kind
    for pattern, other in words.others.items():
        text, kind = re.sub(pattern, other, text), re.sub(pattern, other, kind)
    text = text.strip()
    text = text[:1].upper() + text[1:] if text != plain else text
    return Field(one.names, renamed(kind, words.array), renamed(text, words.array))


def renamed(text: str, array: str) -> str:
    """A text about arrays, in which they are called `array`."""
    if array == "array":
        return text
    text = re.sub(r"\b([Aa])n array\b", rf"\1 {array}", text)
    return re.sub(r"\barray(s?)\b", rf"{array}\1", text)


def filled(text: str) -> str:
    """A paragraph in lines."""
    return textwrap.fill(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False)
