"""Plans of dense decode with a tensor as workspace, so that PyTorch tracks its reads and writes."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from mla_cupy import ops
from mla_cupy.arrays.torch import write_counter
from mla_cupy.errors import ArgumentError, DeviceError, PlanError, explain
from mla_cupy.ops import DecodePlan
from mla_cupy.ops.call import Invocation
from mla_cupy.ops.entry import Plan, Request
from mla_cupy.ops.groups import Fp8, Shard
from mla_cupy.shapes import D_QK
from mla_cupy.torch import library
from mla_cupy.torch.call import arguments_of, check_kind, targets, wanted_results, with_dtypes
from mla_cupy.torch.derivatives import refuse, refuse_batches
from mla_cupy.torch.library import define
from mla_cupy.torch.operators import MLA_DECODE

__all__ = ["TorchDecodePlan", "plan_decode"]

_count_writes = write_counter(torch)
_numbers = itertools.count(1)
_plans: weakref.WeakValueDictionary[int, TorchDecodePlan] = weakref.WeakValueDictionary()


class TorchDecodePlan:
    """A plan for `mla_cupy.torch.mla_decode`: see `mla_cupy.DecodePlan`.

    Make it outside compiled code. It stays in the compiled program as a number and a tensor.

    Attributes
    ----------
    workspace : tensor, uint8
        Without elements for a plan for tensors on the CPU.
    number : int
        Names the plan to the operators.
    """

    def __init__(self, plan: DecodePlan, workspace: torch.Tensor) -> None:
        self.plan = plan
        self.workspace = workspace
        self.number = next(_numbers)
        _plans[self.number] = self

    @property
    def kernel(self) -> str:
        """Name of the kernel that it runs."""
        return self.plan.kernel

    def update(
        self, seqlens: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None, total_q: int | None = None
    ) -> None:
        """Enqueue the schedule for the lengths of this step: see `mla_cupy.DecodePlan.update`."""
        lengths = check_kind("Tensor", "seqlens", seqlens)
        starts = check_kind("Tensor?", "cu_seqlens_q", cu_seqlens_q)
        refuse_batches("the update of a plan", {"seqlens": lengths, "cu_seqlens_q": starts})
        _update(self.workspace, lengths, self.number, starts, check_kind("int?", "total_q", total_q))

    def __repr__(self) -> str:
        return f"Torch{self.plan!r}"


def plan_decode(
    *,
    max_b: int,
    s_q: int,
    h_q: int,
    d_qk: int = D_QK,
    kv_format: str | None = None,
    max_pages: int,
    page_size: int,
    dtype: Any,
    q_rope: bool = False,
    packed: bool = False,
    window: int | None = None,
    tree_mask: bool = False,
    attn_sink: bool = False,
    out_rope: bool = False,
    d_head: int = 0,
    fp8_out: bool = False,
    fp8: Fp8 | None = None,
    shard: Shard | None = None,
    batch_invariant: bool = False,
    split_tokens: int = 4096,
    after_prepare: bool = False,
    device: torch.device | str | None = None,
    kernel: str | None = None,
) -> TorchDecodePlan:
    """Prepare decode steps of one shape: see `mla_cupy.plan_decode`.

    Parameters
    ----------
    max_b, s_q, h_q, d_qk, kv_format, max_pages, page_size, dtype, q_rope, packed, window, tree_mask, attn_sink
        As there.
    out_rope, d_head, fp8_out, fp8, shard, batch_invariant, split_tokens, after_prepare, kernel
        As there.
    device : torch.device or str, optional
        PyTorch's. Default: the current GPU, if there is one, else the CPU.

    Returns
    -------
    TorchDecodePlan
        Its workspace is in PyTorch's memory.
    """
    sizes = {name: value for name, value in locals().items() if name != "device"}
    place = _place(device)
    if place.type == "cpu":
        return TorchDecodePlan(ops.plan_decode(**sizes, device="cpu"), torch.empty(0, dtype=torch.uint8))
    ordinal = torch.cuda.current_device() if place.index is None else place.index
    made: list[torch.Tensor] = []

    def allocate(nbytes: int) -> torch.Tensor:
        made.append(torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", ordinal)))
        return made[0]

    plan = ops.plan_decode(**sizes, device=ordinal, workspace=allocate)
    return TorchDecodePlan(plan, made[0])


def _place(device: Any) -> torch.device:
    """The place of a plan: the CPU, or a GPU that PyTorch can use."""
    there = torch.cuda.is_available()
    if device is None:
        device = "cuda" if there else "cpu"
    expected = f"'cpu'{', a GPU as of torch.device' * there}, or None"
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(explain("device", repr(device), expected)) from error
    if place.type != "cpu" and not (place.type == "cuda" and there):
        raise DeviceError(explain("device", repr(device), expected, "" if there else "PyTorch finds no GPU"))
    return place


class _Placed(Plan):
    """A plan with the operator's workspace argument: PyTorch may have moved the workspace."""

    operation = MLA_DECODE.operation.name

    def __init__(self, plan: DecodePlan, workspace: torch.Tensor) -> None:
        self._plan = plan
        self.address, self.device, self.state = _address(plan, workspace), plan.device, plan.state

    def configuration(self, request: Request) -> Any:
        """The plan's."""
        return self._plan.configuration(request)


def _plan(number: int) -> DecodePlan:
    found = _plans.get(number)
    if found is None:
        raise PlanError(explain("plan", f"number {number}", "a live plan", "keep the plan alive"))
    return found.plan


def _address(plan: DecodePlan, workspace: torch.Tensor) -> int:
    """Address of the workspace; a plan for CPU tensors, which a GPU may still serve, has separate memory."""
    return workspace.data_ptr() if workspace.numel() else plan.address


def _run_update(
    workspace: torch.Tensor,
    seqlens: torch.Tensor,
    plan: int,
    cu_seqlens_q: torch.Tensor | None = None,
    total_q: int | None = None,
) -> None:
    found = _plan(plan)
    found.schedule(seqlens, _address(found, workspace), None, cu_seqlens_q, total_q)
    _count_writes([workspace])


def _describe(workspace: torch.Tensor, plan: int, *given: Any, **results: Any) -> Invocation:
    described = MLA_DECODE.describe(*given, **results)
    described.plan = _Placed(_plan(plan), workspace)
    return described


def _describe_fake(workspace: torch.Tensor, plan: int, *given: Any, **results: Any) -> Invocation:
    """Leave out the plan: it has an address, which a fake workspace has not."""
    return MLA_DECODE.describe(*given, **results)


def _run(run: Callable[..., Any], workspace: torch.Tensor, *given: Any, **results: Any) -> Any:
    """Make or write the results, and count the write to the plan's workspace."""
    made = run(_describe, workspace, *given, **results)
    _count_writes([workspace])
    return made


_HEAD = f"(Tensor(z!) workspace, int plan, {MLA_DECODE.arguments}"
_update = define(
    "decode_plan_update",
    "(Tensor(z!) workspace, Tensor seqlens, int plan, Tensor? cu_seqlens_q=None, int? total_q=None) -> ()",
    _run_update,
    lambda workspace, seqlens, plan, cu_seqlens_q=None, total_q=None: None,
)
_planned = define(
    "mla_decode_planned",
    f"{_HEAD}) -> {MLA_DECODE.returns}",
    partial(_run, library.make),
    partial(library.fake, _describe_fake),
)
_planned_out = define(
    "mla_decode_planned_out",
    f"{_HEAD}, *, {MLA_DECODE.results}) -> ()",
    partial(_run, library.write),
    partial(library.fake_write, _describe_fake),
)


def plan_of(plan: Any) -> DecodePlan | None:
    """Return the plan for the public function."""
    if plan is None:
        return None
    if not isinstance(plan, TorchDecodePlan):
        remedy = "make it with mla_cupy.torch.plan_decode"
        raise PlanError(explain("plan", repr(plan), "a TorchDecodePlan, or None", remedy))
    return plan.plan


def call_planned(
    plan: TorchDecodePlan,
    arrays: tuple[torch.Tensor | None, ...],
    options: tuple[Any, ...],
    workspace: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """Call an operator with a plan: the one that returns results, or the one that writes to the passed tensors."""
    if workspace is not None:
        raise ArgumentError(explain("workspace", "a tensor, with a plan", "None: the plan has its own"))
    plan_of(plan)
    arguments, results = arguments_of(MLA_DECODE, arrays, options)
    wanted = wanted_results(MLA_DECODE, arguments, results)
    given = targets({name: results[name] for name in wanted})
    refuse_batches("mla_decode with a plan", {**arguments, **given})
    refuse("mla_decode", arguments)
    arguments = with_dtypes(MLA_DECODE, arguments)
    if not given:
        made = _planned(plan.workspace, plan.number, **arguments)
        return tuple(x if name in wanted else None for (name, _, _), x in zip(MLA_DECODE.outputs, made, strict=True))
    _planned_out(plan.workspace, plan.number, **arguments, **given)
    return tuple(given.get(name) for name, _, _ in MLA_DECODE.outputs)
