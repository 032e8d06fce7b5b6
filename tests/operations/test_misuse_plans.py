"""Plans of every kind, made, updated and used in any order with nonsense: documented errors, or right results."""

from __future__ import annotations

import inspect
import random
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import PrefixGroup
from mla_cupy.ops import COMPOSITE_OPERATIONS, OPERATIONS
from mla_cupy.ops.operation import Operation
from mla_cupy.parallel import ContextParallel, HostTransport, LocalGroup, Rendezvous
from tests.operations.test_misuse_fuzz import assert_right
from tests.support.flat import flat, mla_decode
from tests.support.mistakes import Call, Foreign
from tests.support.misuse import Lazy, Refused, attempt, misused, nonsense, numbers, spoil_array
from tests.support.operations import SCALE, good_call
from tests.support.recorder import Recorder

CALLS = 40
"""Calls of a session."""
QUICK, SLOW = 10, 100
"""Sessions in each place."""
DECODE: Call = {"s_q": 3, "h_q": 4, "max_pages": 4, "page_size": 16, "dtype": "bfloat16"}
GROUPS = (PrefixGroup(0, 2, 1),)
CASCADE: Call = {"b": 2, "s_q": 3, "h_q": 4, "max_pages": 4, "page_size": 16, "dtype": "bfloat16"}
LENGTHS = ([20, 33], [64, 50], [20])


class Planned:
    """A plan, and what it must serve."""

    def __init__(self, plan: Any, made: Call) -> None:
        self.plan, self.made = plan, made
        self.lengths: list[int] | None = None

    def assert_serves(self, call: Call, about: str) -> None:
        """The sizes of an accepted call are the plan's, and its latest update's."""
        table = call["block_table"]
        assert table.shape[1] == self.made["max_pages"], about
        assert call["kv_cache"].shape[1] == self.made["page_size"], about
        assert call["q"].shape[1:3] == (self.made["s_q"], self.made["h_q"]), about
        assert self.lengths is not None, about
        assert len(self.lengths) == len(table), about


class Session:
    """Plans of dense decode and of shared prefixes, and calls with them."""

    def __init__(self, seed: int, recorder: Recorder | None) -> None:
        self.rng, self.numpy, self.recorder = random.Random(seed), np.random.default_rng([seed, 16]), recorder
        self.plans: dict[str, list[Planned]] = {"mla_decode": [], "cascade_decode": []}
        self.about = f"session {seed}"
        self.accepted = {"make": 0, "update": 0, "call": 0}

    def run(self) -> None:
        for number in range(CALLS):
            name = self.rng.choice(("mla_decode", "mla_decode", "cascade_decode"))
            about = f"{self.about}, call {number}"
            if not self.plans[name] or self.rng.random() < 0.2:
                self.make(name, about)
            elif self.rng.random() < 0.4:
                self.update(self.rng.choice(self.plans[name]), about)
            else:
                self.call(name, about)

    def nonsense(self) -> Any:
        """But what would make CuPy look for a GPU, where there is a fake one."""
        found = nonsense(self.numpy)
        return None if self.recorder and type(found) is Foreign else found

    def attempt(self, call: Any, names: Any, kept: Any, about: str) -> Any:
        """Nothing is launched before an error."""
        if self.recorder:
            for record in (self.recorder.launches, self.recorder.memsets, self.recorder.allocations):
                record.clear()
        outcome = attempt(call, names, kept, about)
        if self.recorder and isinstance(outcome, Refused):
            written = (self.recorder.launches, self.recorder.memsets, self.recorder.allocations)
            assert written == ([], [], []), f"{about}: {outcome.error}"
        return outcome

    def make(self, name: str, about: str) -> None:
        """Half of them well."""
        function: Any = mla_cupy.plan_decode if name == "mla_decode" else mla_cupy.plan_cascade
        given: Call = {"max_b": 2, **DECODE} if name == "mla_decode" else {"groups": GROUPS, **CASCADE}
        if self.rng.random() < 0.5:
            taken = [x for x in inspect.signature(function).parameters if x != "workspace"]
            given[self.rng.choice(taken)] = self.nonsense()
        elif self.rng.random() < 0.3:
            size = self.rng.choice(("h_q", "page_size", "max_pages", "s_q"))
            given[size] *= 2
        plan = self.attempt(lambda: function(**given), list(inspect.signature(function).parameters), (), about)
        if not isinstance(plan, Refused):
            self.accepted["make"] += 1
            assert repr(plan)
            self.plans[name] = [*self.plans[name][-3:], Planned(plan, given)]

    def update(self, planned: Planned, about: str) -> None:
        lengths = np.array(self.rng.choice(LENGTHS), np.int32)
        given: Any = lengths
        if self.rng.random() < 0.4:
            given = spoil_array(self.numpy, lengths) if self.rng.random() < 0.5 else self.nonsense()
        options = {"stream": self.nonsense()} if self.rng.random() < 0.1 and _takes_stream(planned.plan) else {}
        names = ("seqlens", "stream")
        outcome = self.attempt(lambda: planned.plan.update(given, **options), names, (given,), about)
        if not isinstance(outcome, Refused):
            self.accepted["update"] += 1
            assert isinstance(given, np.ndarray), f"{about}: {given}"
            assert given.ndim == 1, f"{about}: {given}"
            planned.lengths = given.tolist()

    def call(self, name: str, about: str) -> None:
        """Call with a plan of this kind, or of another, and now and then with something else."""
        operation: Operation = (OPERATIONS if name == "mla_decode" else COMPOSITE_OPERATIONS)[name]
        function = flat(getattr(mla_cupy, name))
        taken = list(inspect.signature(function).parameters)
        good = {"scale": SCALE, **good_call(operation, self.rng.randrange(3))}
        if name == "cascade_decode":
            good["groups"] = self.rng.choice((GROUPS, GROUPS, (), (PrefixGroup(1, 1, 1),)))
        good.pop("tree_mask", None)
        planned = self.rng.choice(self.plans[self.rng.choice((name, name, name, *self.plans))] or self.plans[name])
        if planned.lengths is not None and self.rng.random() < 0.9:
            good["seqlens"] = np.array(planned.lengths, np.int32)
        kinds = [option for option in taken if option not in operation.names and option != "groups"]
        call = good if self.rng.random() < 0.5 else misused(self.numpy, good, ["out", "lse"], [], kinds)
        call["plan"] = planned.plan if self.rng.random() < 0.95 else self.nonsense()
        results = self.attempt(lambda: function(**call), [*taken, *operation.groups], call.values(), about)
        if isinstance(results, Refused):
            return
        self.accepted["call"] += 1
        if call["plan"] is planned.plan and (name == "mla_decode" or call["groups"]):
            planned.assert_serves(call, about)
        same = planned.lengths is not None and np.array_equal(planned.lengths, np.clip(call["seqlens"], 0, 64))
        if self.recorder is None and (name == "mla_decode" or same):
            assert_right(operation, call, results, about)  # type: ignore[arg-type]


def _takes_stream(plan: Any) -> bool:
    return "stream" in inspect.signature(plan.update).parameters


@pytest.mark.parametrize("on_gpu", [True, False], ids=["recorded", "host"])
@pytest.mark.parametrize("sessions", numbers(QUICK, SLOW))
def test_plans(sessions: int, on_gpu: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = request.getfixturevalue("recorder") if on_gpu else None
    if not on_gpu:
        monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    made = [Session(seed, recorder) for seed in range(sessions)]
    for session in made:
        session.run()
    for what in ("make", "update", "call"):
        assert 0 < sum(session.accepted[what] for session in made) < CALLS * sessions


# ---- Context parallelism --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", numbers(60, 1000))
@pytest.mark.parametrize("method", ["decode", "merge"])
def test_context_parallel(method: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of one; its results equal a call's without a group, rounded twice."""
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    accepted = 0
    function = getattr(ContextParallel, method)
    taken = [name for name in inspect.signature(function).parameters if name != "self"]
    operation = OPERATIONS["mla_decode" if method == "decode" else "merge_states"]
    for seed in range(count):
        rng = np.random.default_rng([seed, 17])
        context = ContextParallel(HostTransport(LocalGroup(1, timeout=5).member(0)))
        if method == "decode":
            taken = list(inspect.signature(context.decode).parameters)
            good = {name: x for name, x in good_call(operation).items() if name in taken} | {"scale": 0.1}
        else:
            good = {"outs": rng.standard_normal((2, 3, 4, 8), np.float32), "lses": np.zeros((2, 4, 3), np.float32)}
            good |= {"out": np.full((2, 3, 4, 8), 7, np.float32), "lse": np.full((2, 4, 3), 7, np.float32)}
        options = [name for name in taken if name not in good]
        call = misused(rng, good, ["out", "lse"], [], options)
        results = attempt(lambda: function(context, **call), taken, call.values(), f"seed {seed}")  # noqa: B023
        if isinstance(results, Refused):
            continue
        accepted += 1
        if method == "decode":
            plain = {name: x for name, x in call.items() if name not in ("out", "lse", "plan", "local_seqlens")}
            plain = {
                name: np.array(x, order="C") if isinstance(x, np.ndarray) and x.ndim else x for name, x in plain.items()
            }
            wanted = mla_decode(**plain)
        else:
            options = {name: x for name, x in call.items() if name not in ("outs", "lses", "out", "lse", "stream")}
            wanted = mla_cupy.merge_states(*(np.array(call[x], order="C")[None] for x in ("outs", "lses")), **options)
        for got, expected in zip(results, wanted, strict=True):
            rounded = got.astype(np.float32), expected.astype(np.float32)
            np.testing.assert_allclose(*rounded, rtol=2.0**-7, atol=1e-5, err_msg=f"seed {seed}")
    assert 0 < accepted < count


def _clean(x: Any) -> Any:
    return np.array(x, order="C") if isinstance(x, np.ndarray) and x.ndim else x


@pytest.mark.parametrize("count", numbers(60, 500))
def test_groups(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups made of nonsense work, or are refused."""
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    for seed in range(count):
        rng = np.random.default_rng([seed, 18])
        given: Call = {"world": 1, "rank": 0, "address": ("127.0.0.1", 9), "timeout": 0.01, "partial_dtype": "float32"}
        given |= {"group": None, "transport": None}
        given[str(rng.choice(list(given)))] = nonsense(rng)
        if any(isinstance(x, Lazy) for x in given.values()):
            continue  # it has all that a group has
        context = attempt(lambda: _context(rng, given), [*given, "rendezvous"], (), f"seed {seed}")  # noqa: B023
        if not isinstance(context, Refused) and context.world == 1:
            taken = inspect.signature(context.decode).parameters
            good = {name: x for name, x in good_call(OPERATIONS["mla_decode"]).items() if name in taken}
            del good["out"]  # as wide as W_UV's result
            attempt(lambda: context.decode(**good, scale=0.1), ["out_dtype"], (), f"seed {seed}")  # noqa: B023


def _context(rng: np.random.Generator, given: Call) -> ContextParallel:
    if rng.random() < 0.5:
        group: Any = LocalGroup(given["world"], timeout=given["timeout"]).member(given["rank"])
    else:
        group = Rendezvous(given["world"], given["rank"], given["address"], timeout=given["timeout"])
    transport = HostTransport(group if given["group"] is None else given["group"])
    chosen = transport if given["transport"] is None else given["transport"]
    return ContextParallel(chosen, partial_dtype=given["partial_dtype"])
