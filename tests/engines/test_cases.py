"""Runs of the real engine are judged: what passes, and what must not."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.engines.cpu.cases import CASES, Case, judged


def told(tokens: list[int], cached: int) -> dict[str, Any]:
    steps = [{str(x): -0.5, str(x + 1): -0.5625, str(x + 2): -3.0} for x in tokens]
    return {"tokens": tokens, "cached": cached, "logprobs": steps}


def result() -> dict[str, Any]:
    rounds = [[told([3, 4, 5], cached), told([6, 7, 8], 0), told([9, 10, 11], 0)] for cached in (0, 64)]
    facts = {
        "implementation": ["mla_cupy.integrations.vllm_backend.MlaCupyImpl"],
        "page_size": 64,
        "second_runner": True,
        "shapes": {
            "q (3, 1, 16, 576), pages of 64, bfloat16, planned": 4,
            "prefill: cached tokens": 2,
            "prefill: new tokens, merged": 2,
        },
    }
    return {"rounds": rounds, "facts": facts}


def test_equal_and_near_tokens_pass() -> None:
    ours = result()
    assert judged(CASES["plain"], result(), ours) | {"shapes": {}} == {
        "passed": True,
        "equal": 6,
        "of": 6,
        "partings": [],
        "max_logprob_difference": 0.0,
        "partings_of_rounds": {"reference": [], "ours": []},
        "cached_tokens": 64,
        "page_size": 64,
        "second_runner": True,
        "shapes": {},
    }
    ours["rounds"][1][0]["tokens"][1] = 5
    found = judged(CASES["plain"], result(), ours)
    assert (found["passed"], found["partings"]) == (True, [{"round": 1, "prompt": 0, "step": 1, "gap": 0.0625}])


@pytest.mark.parametrize("what", ["far", "both far", "unknown", "often", "nothing cached", "another", "another shape"])
def test_what_does_not_pass(what: str) -> None:
    reference, ours = result(), result()
    case: Case = CASES["plain"]
    if what == "both far":  # equal, and not what they were in the first round
        for told in (reference, ours):
            told["rounds"][1][0] |= {"tokens": [5, 4, 5]}
            told["rounds"][1][0]["logprobs"][0] = {"5": -0.1}
    if what in ("far", "unknown"):
        for told in ours["rounds"]:
            told[1]["tokens"][0] = token = 8 if what == "far" else 99
            told[1]["logprobs"][0][str(token)] = -0.4
    elif what == "often":
        for sequence in (x for told in ours["rounds"] for x in told):
            sequence["tokens"][0] += 1
    elif what == "nothing cached":
        ours["rounds"][1][0]["cached"] = 0
    elif what == "another":
        ours["facts"]["implementation"] = ["vllm.v1.attention.backends.mla.flashmla.FlashMLAImpl"]
    else:
        case = CASES["fp8"]
    assert judged(case, reference, copy.deepcopy(ours))["passed"] is False
