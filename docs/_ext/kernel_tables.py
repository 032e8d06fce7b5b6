"""The tables of kernels, made from the records that the calls use."""

from __future__ import annotations

import logging
from typing import Any

from kernel_choice import GPUS, SITUATIONS, chosen
from tables import MarkdownDirective, table

from mla_cupy.kernels import KERNELS
from mla_cupy.kernels.decode import DECODE
from mla_cupy.kernels.decode.problem import Forms
from mla_cupy.ops import OPERATIONS
from mla_cupy.ops.combinations import PARTS, TABLE, Conflict
from mla_cupy.runtime.device import TARGETS


class KernelChoice(MarkdownDirective):
    """Table of the main kernel that the pipeline chooses for each kind of call and each GPU."""

    def markdown(self) -> str:
        """The table."""
        rows = [[label, *(chosen(pipeline, problem, gpu) for gpu in GPUS)] for label, pipeline, problem in SITUATIONS]
        return table(["call", *(gpu.name for gpu in GPUS)], rows)


class KernelOrder(MarkdownDirective):
    """Table of the kernels of each operation with a choice, in the order in which they are tried."""

    def markdown(self) -> str:
        """A numbered list per operation."""
        lists = []
        for name, operation in OPERATIONS.items():
            kernels = operation.pipeline.kernels
            if len(kernels) > 1:
                entries = "\n".join(f"1. `{k.name}`: {k.about}" + _condition(k) for k in kernels)
                lists.append(f"**`{name}`**\n\n{entries}\n")
        return "\n".join(lists)


def _condition(kernel: Any) -> str:
    """Condition under which a kernel runs, if not everywhere by default."""
    if kernel.on_request:
        return " (only by `kernel=`)"
    return " (by `kernel=`, or once the self-test has passed)" if kernel.unproven else ""


class DecodeForms(MarkdownDirective):
    """Table of the forms of dense decode, and of the widths of values, that each of its kernels takes."""

    def markdown(self) -> str:
        """The table: the kernels' own words."""
        rows = [
            [
                f"`{kernel.name}`",
                *("yes" if form in kernel.forms else "" for form in Forms._fields),
                ", ".join(map(str, kernel.value_widths)),
            ]
            for kernel in DECODE.kernels
        ]
        return table(["kernel", *(f"`{form}`" for form in Forms._fields), "`d_v`"], rows)


class Combinations(MarkdownDirective):
    """Table of the parts of a call that exclude each other, which the calls themselves check."""

    def markdown(self) -> str:
        """A row for each conflict, with the operations that have it."""
        found: dict[Conflict, list[str]] = {}
        for name, conflicts in TABLE.items():
            for conflict in conflicts:
                found.setdefault(conflict, []).append(f"`{name}`")
        rows = [[_part(x.part), _part(x.other), ", ".join(names), x.remedy] for x, names in found.items()]
        return table(["this", "not with", "operations", "instead"], rows)


def _part(name: str) -> str:
    """A part of a call in the words of the messages."""
    return PARTS[name].beside.removeprefix("with ").removeprefix("for ").replace("{}", _EXAMPLES.get(name, ""))


_EXAMPLES = {"codes": "e4m3", "half": "16 bits", "narrow": "320", "cp_world": "2"}


class KernelList(MarkdownDirective):
    """Every kernel of the package."""

    def markdown(self) -> str:
        """The table."""
        rows = [
            [
                f"`{kernel.name}`",
                ", ".join(kernel.archs) or "any",
                kernel.about,
                f"{len(kernel.variants)}, {max(len(kernel.core_on(arch)) for arch in TARGETS)}",
            ]
            for kernel in KERNELS.values()
        ]
        return table(["kernel", "targets", "does", "builds, on import"], rows)


def setup(app: Any) -> dict[str, Any]:
    """Register with Sphinx."""
    logging.getLogger("mla_cupy").setLevel(logging.ERROR)  # the tables say which kernels are slow
    app.add_directive("kernel-choice", KernelChoice)
    app.add_directive("combinations", Combinations)
    app.add_directive("decode-forms", DecodeForms)
    app.add_directive("kernel-order", KernelOrder)
    app.add_directive("kernel-list", KernelList)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
