"""The stages of `indexer_select` that list candidates instead of storing logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mla_cupy.kernels.indexer.logits.problem import LogitsOptions
from mla_cupy.kernels.indexer.select.candidates import SELECT_CANDIDATES, CandidateOptions, CandidateProblem
from mla_cupy.kernels.indexer.topk import TOPK_OF_SOME
from mla_cupy.ops.indexer import logits as logits_operation
from mla_cupy.ops.indexer import topk as topk_operation
from mla_cupy.ops.operation import Examined, Input, Operation, Output, Views, only_int32


def problem_of(views: Views, options: Any) -> CandidateProblem:
    """The problem of a call of `indexer_select`."""
    given = LogitsOptions(options.accumulate, clean=False, out_dtype=None, kernel=None)
    logits = logits_operation.OPERATION.examine(views, given).problem
    return CandidateProblem(logits, options.topk, options.order, options.keep_first > 0 or options.keep_last > 0)


def _examine(views: Views, options: CandidateOptions) -> Examined:
    given = LogitsOptions("float32", clean=False, out_dtype=None, kernel=None)
    logits = logits_operation.OPERATION.examine(views, given).problem
    return Examined(CandidateProblem(logits, options.topk), options, {"topk": options.topk})


def _of_candidates() -> Operation:
    """Selection through lists, which names the rows whose lists lack keys: it has no public function."""
    logits = logits_operation.OPERATION
    return Operation(
        "indexer_select_candidates",
        inputs=(*logits.inputs, Input("candidates", "s_q list", ("float32",), scratch=True)),
        outputs=(
            Output("indices", "s_q topk", only_int32, layout="rows"),
            Output("counts", "s_q", only_int32),
            Output("again_begins", "s_q", only_int32),
            Output("again_ends", "s_q", only_int32),
        ),
        sizes=logits.sizes,
        min_sizes=logits.min_sizes,
        options=CandidateOptions,
        examine=_examine,
        pipeline=SELECT_CANDIDATES,
        internal=True,
    )


OF_CANDIDATES = _of_candidates()
TOPK_OF_SOME_ROWS = replace(topk_operation.OPERATION, name="indexer_topk_of_some", pipeline=TOPK_OF_SOME, internal=True)
"""Selects from the logits of rows with keys, and leaves the results of other rows alone."""
