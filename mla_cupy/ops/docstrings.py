"""Docstrings of the bindings' functions, made at import from the docstrings of the public functions.

A binding's function has no docstring in the source. It gets the public function's, without its missing parameters, with
its library's word for arrays, and with the library's own remarks.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from mla_cupy.ops.operation import Operation

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
    """A docstring in sections; `about` is everything before "Parameters", `raises` the unchanged text of a section."""

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
    """Words of a binding that differ from the public functions' words.

    Attributes
    ----------
    array : str
        Word for its arrays.
    others : mapping
        Further patterns, and their replacements.
    donated : bool
        Whether arrays for results donate their memory.
    """

    array: str
    others: Mapping[str, str]
    donated: bool = False


_DONATED = ("Donated: the result takes over its memory.", "Donated: the results take over their memory.")
_NOT_HERE = (
    re.compile(r"\s*Not for JAX, whose arrays cannot be written(?:: [^.]*`[\w.]+`[^.]*)?\."),
    re.compile(r"Of the caller's library(?:\.|; )"),
)


@dataclass(frozen=True)
class Text:
    """A library's remarks on one function: all of them are optional.

    Attributes
    ----------
    summary : str
        Replaces the public function's first line.
    more : str
        Appended to the text before the parameters.
    parameters : mapping
        Additions to a parameter's text, by its name, or the first of several.
    notes, examples : str
        Those sections.
    """

    summary: str = ""
    more: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    notes: str = ""
    examples: str = ""


def of_function(function: Callable[..., object], operation: Operation, words: Words, text: Text) -> Docstring:
    """The docstring of a binding's function: the public function's, for the parameters that this one has."""
    found = adapted(read(operation.function), words, inspect.signature(function).parameters, operation)
    first, _, rest = found.about.partition("\n")
    about = "\n".join((text.summary or first, rest)) if rest else text.summary or first
    about += f"\n\n{filled(f'The notes of `mla_cupy.{operation.name}` hold here, too. {text.more}')}"
    parameters = tuple(
        replace(x, text=f"{x.text} {text.parameters.get(x.names[0], '')}".rstrip()) for x in found.parameters
    )
    none = "It has no gradient." if operation.derivative == "none" else ""
    return replace(found, about=about, parameters=parameters, notes=text.notes or none, examples=text.examples)


def of_objective(found: Docstring, text: Text, array: str) -> Docstring:
    """The docstring of a loss, turned into the one of its differentiable form."""
    straight = (
        "Of e4m3 codes: the index queries and keys that they stand for, in bfloat16 or float32, which take the "
        "gradients in their place. Without them, only `weights` has a gradient."
    )
    parameter = Field(("straight_through",), f"({array}, {array}), optional", straight)
    returns = (
        Field(("objective",), f"{array}, (), float32", "sum(row_weights * kl)."),
        Field(("kl",), f"{array}, (s_q,) or per head (s_q, h), float32", "Without a gradient."),
    )
    about = f"{text.summary}\n\n{filled(text.more)}"
    return replace(found, about=about, parameters=(*found.parameters, parameter), returns=returns)


def adapted(docstring: Docstring, words: Words, parameters: Collection[str], operation: Operation) -> Docstring:
    """A docstring in a binding's words, for a function with these parameters."""
    results, found = {*(output.name for output in operation.outputs), *operation.result_groups}, []
    for one in docstring.parameters:
        names = tuple(name for name in one.names if name in parameters)
        if names:
            donated = words.donated and set(names) <= results
            text = _DONATED[len(names) > 1 or names[0] in operation.groups] if donated else one.text
            found.append(in_words(replace(one, names=names, text=text), words))
    returns = tuple(_named_or_type(in_words(one, words)) for one in docstring.returns)
    return replace(docstring, parameters=tuple(found), returns=returns)


def _named_or_type(one: Field) -> Field:
    return one if one.names else replace(one, names=(one.kind,), kind="")


def in_words(one: Field, words: Words) -> Field:
    """A field with a binding's word for arrays, and without remarks for other libraries."""
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


NO_GRADIENT_OF_DECODE = "It has no gradient: decode serves inference."
NO_GRADIENT_OF_HEAD_SUMS = "It has no gradient: nothing flows to the main attention."
_OBJECTIVE = {
    "indexer_sparse_objective": (
        "Compute sum(row_weights * kl) of the loss over selected keys, differentiable by indexer and weights.",
        "`indexer_sparse_loss` with gradients by index_q, index_k and weights, computed in the same call; "
        "the backward multiplies them by the cotangent, in the dtypes of the arrays. Everything else counts as a "
        "constant.",
    ),
    "indexer_warmup_objective": (
        "Compute sum(row_weights * kl) of the warm-up loss, differentiable by indexer and weights.",
        "`indexer_warmup_loss` with gradients by index_q, index_k and weights, computed in the same call: "
        "its larger part, the scores of the main attention, is not repeated. The backward multiplies them by the "
        "cotangent, in the dtypes of the arrays. Everything else counts as a constant.",
    ),
}
_MEAN = {"row_weights": "For a mean, 1 / s_q."}
OBJECTIVES: dict[str, Text] = {name: Text(summary, more, _MEAN) for name, (summary, more) in _OBJECTIVE.items()}
