"""Options of log-sum-exps, which all operations that return them share."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from mla_cupy.kernels.params import LseConvention


class LseOptions(NamedTuple):
    """Base of the logarithms, "e" or "2", and the log-sum-exp of a row that sees no token."""

    lse_base: str = "e"
    empty_lse: float = -math.inf

    @classmethod
    def of(cls, options: Any) -> LseOptions:
        """Pick them from the options of an operation."""
        return cls(options.lse_base, options.empty_lse)

    @property
    def convention(self) -> LseConvention:
        """Equivalent member of parameter structs."""
        return LseConvention(factor=math.log(2) if self.lse_base == "e" else 1.0, empty=self.empty_lse)
