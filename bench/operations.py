"""The operations that can be benchmarked: their cases, their inputs, how a result is checked, who computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import cases, check, peers, sparse_cases, sparse_check, sparse_inputs
from .cases import Case
from .device import Device
from .peers import Choices, Known, Verdict
from .recorders import EVENTS, GRAPH


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation. `Any` stands for its own kind of case, input set, expectation or outputs."""

    name: str  # on the command line
    title: str
    suites: Mapping[str, Sequence[Any]]
    parse: Callable[[str], Any]
    inputs: Callable[[Any, str, int, Device], Any]  # case, dtype, seed
    expect: Callable[[Any, str, Any, Device], Sequence[Any]]  # case, dtype, input set
    judge: Callable[[Sequence[Any], Any, str, Device], Verdict]  # expectation, outputs, dtype
    results: tuple[str, ...]  # fields of the outputs that every call writes, in 16 bits
    implementations: Callable[[Choices], Known]
    default_peers: Callable[[Choices], list[str]]
    method: str

    def select(self, names: Sequence[str], suite: str) -> tuple[Case, ...]:
        """The cases asked for by name, or the suite when no name is given; doubles are dropped."""
        return tuple(dict.fromkeys([self.parse(name) for name in names] if names else self.suites[suite]))


def _decode_inputs(case: cases.DecodeCase, dtype: str, seed: int, device: Device) -> Any:
    return device.inputs(case, dtype, seed)


def _judge_sparse(expected: Sequence[Any], outputs: Any, dtype: str, device: Device) -> Verdict:
    return sparse_check.judge(expected, outputs, device)


DECODE = Operation(
    name="decode",
    title="dense paged decode",
    suites=cases.SUITES,
    parse=cases.parse,
    inputs=_decode_inputs,
    expect=check.expect,
    judge=check.judge,
    results=("out",),
    implementations=peers.decode_implementations,
    default_peers=lambda choices: ["generic", "cupy"] + (["flashmla", "fa3"] if choices.peers_dir else []),
    method=GRAPH,
)
SPARSE_FORWARD = Operation(
    name="sparse-forward",
    title="sparse forward: each query attends to the rows that its indices choose",
    suites=sparse_cases.FORWARD_SUITES,
    parse=sparse_cases.parse_forward,
    inputs=sparse_inputs.forward_inputs,
    expect=sparse_check.expect_forward,
    judge=_judge_sparse,
    results=("out",),
    implementations=peers.forward_implementations,
    default_peers=lambda choices: ["flashmla"] if choices.peers_dir else [],
    method=GRAPH,
)
SPARSE_BACKWARD = Operation(
    name="sparse-backward",
    title="sparse backward, whole: what comes before and after the main kernel included",
    suites=sparse_cases.BACKWARD_SUITES,
    parse=sparse_cases.parse_backward,
    inputs=sparse_inputs.backward_inputs,
    expect=sparse_check.expect_backward,
    judge=_judge_sparse,
    results=("dq", "dkv"),
    implementations=peers.backward_implementations,
    default_peers=lambda choices: [],
    method=EVENTS,
)
OPERATIONS = {operation.name: operation for operation in (DECODE, SPARSE_FORWARD, SPARSE_BACKWARD)}
