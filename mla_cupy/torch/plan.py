"""Plans of dense decode whose workspace is a tensor, so that PyTorch knows what is written and read when."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from mla_cupy.errors import PlanError, explain
from mla_cupy.ops import OPERATIONS, DecodePlan, plan_decode
from mla_cupy.ops.call import Invocation, run
from mla_cupy.ops.entry import Plan, Request
from mla_cupy.torch.derivatives import refuse
from mla_cupy.torch.library import Arguments, define, new_results

__all__ = ["TorchDecodePlan"]

_DECODE = OPERATIONS["mla_decode"]
_ARGUMENTS = Arguments(_DECODE)
_numbers = itertools.count(1)
_plans: weakref.WeakValueDictionary[int, TorchDecodePlan] = weakref.WeakValueDictionary()


class TorchDecodePlan:
    """A plan for `mla_cupy.torch.mla_decode`: see `mla_cupy.DecodePlan`.

    Make it outside of what is compiled. It stays in the compiled program as a number and a tensor.

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

    def update(self, seqlens: torch.Tensor) -> None:
        """Enqueue the schedule for the lengths of this step: see `mla_cupy.DecodePlan.update`."""
        _update(self.workspace, seqlens, self.number)

    def __repr__(self) -> str:
        return f"Torch{self.plan!r}"


def make_plan(device: Any, **sizes: Any) -> TorchDecodePlan:
    """A plan with its workspace in PyTorch's memory; `device` is PyTorch's, the current GPU or else the CPU if None."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(device)
    if place.type == "cpu":
        return TorchDecodePlan(plan_decode(**sizes), torch.empty(0, dtype=torch.uint8))
    ordinal = torch.cuda.current_device() if place.index is None else place.index
    made: list[torch.Tensor] = []

    def allocate(nbytes: int) -> torch.Tensor:
        made.append(torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", ordinal)))
        return made[0]

    plan = plan_decode(**sizes, device=ordinal, workspace=allocate)
    return TorchDecodePlan(plan, made[0])


class _Placed(Plan):
    """A plan, with the memory that the operator was given: PyTorch may have moved the workspace."""

    operation = _DECODE.name

    def __init__(self, plan: DecodePlan, workspace: torch.Tensor) -> None:
        self._plan = plan
        self.address, self.device, self.state = _address(plan, workspace), plan.device, plan.state

    def configuration(self, request: Request) -> Any:
        """The plan's."""
        return self._plan.configuration(request)


def _plan(number: int) -> DecodePlan:
    found = _plans.get(number)
    if found is None:
        raise PlanError(explain("plan", f"number {number}", "a plan that is still there", "keep the plan alive"))
    return found.plan


def _address(plan: DecodePlan, workspace: torch.Tensor) -> int:
    """The workspace's; a plan for tensors on the CPU, which a GPU may serve all the same, has memory of its own."""
    return workspace.data_ptr() if workspace.numel() else plan.address


def _run_update(workspace: torch.Tensor, seqlens: torch.Tensor, plan: int) -> None:
    found = _plan(plan)
    found.schedule(seqlens, _address(found, workspace))


def _run(workspace: torch.Tensor, plan: int, *given: Any) -> tuple[Any, ...]:
    arrays, options = _ARGUMENTS.split(given)
    return run(Invocation(_DECODE, arrays, options, plan=_Placed(_plan(plan), workspace)))


def _fake(workspace: torch.Tensor, plan: int, *given: Any) -> tuple[torch.Tensor, ...]:
    return new_results(_DECODE, _ARGUMENTS.examine(given), given[0])


def _run_out(workspace: torch.Tensor, plan: int, *given: Any, out: torch.Tensor, lse: torch.Tensor) -> None:
    arrays, options = _ARGUMENTS.split(given, (out, lse))
    run(Invocation(_DECODE, arrays, options, plan=_Placed(_plan(plan), workspace)))


def _fake_out(workspace: torch.Tensor, plan: int, *given: Any, out: torch.Tensor, lse: torch.Tensor) -> None:
    _ARGUMENTS.examine(given, (out, lse))


_HEAD = f"(Tensor(z!) workspace, int plan, {_ARGUMENTS.schema}"
_update = define(
    "decode_plan_update",
    "(Tensor(z!) workspace, Tensor seqlens, int plan) -> ()",
    _run_update,
    lambda workspace, seqlens, plan: None,
)
_planned = define("mla_decode_planned", f"{_HEAD}) -> (Tensor, Tensor)", _run, _fake)
_planned_out = define(
    "mla_decode_planned_out", f"{_HEAD}, *, Tensor(a!) out, Tensor(b!) lse) -> ()", _run_out, _fake_out
)


def run_planned(
    plan: TorchDecodePlan,
    inputs: tuple[torch.Tensor, ...],
    options: dict[str, Any],
    given: dict[str, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call an operator: the one that returns results, or the one that writes to `given`."""
    refuse("mla_decode", dict(zip(_DECODE.names, inputs, strict=False)))
    if not given:
        return _planned(plan.workspace, plan.number, *inputs, **options)  # type: ignore[no-any-return]
    _planned_out(plan.workspace, plan.number, *inputs, **options, **given)
    return given["out"], given["lse"]
