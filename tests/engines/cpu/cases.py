"""Cases of the real engine on a CPU, and how two runs of one are compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engines import packages

REPOSITORY = Path(__file__).resolve().parents[3]
NEAR = 0.125
"""Two tokens whose logprobs are no further apart may change places: two steps of bfloat16 for logits of 8 to 16."""


OURS = "mla_cupy.integrations.vllm_backend.MlaCupyImpl"
MISORDERED = ("0.24.0", "0.25.1", "0.26.0", "0.27.1")
"""Versions whose second runner orders prefills by length, while their merge with cached prefixes takes those that have
one to come first: prompts lose their prefixes, whatever the backend. Cases run with the first runner there."""


@dataclass(frozen=True)
class Case:
    """Options of vLLM, and what must be seen in such a run.

    Attributes
    ----------
    options : dict
        Of `LLM`.
    drafting : bool
        The model drafts tokens itself.
    older_runner : bool
        vLLM's first model runner.
    seen : str
        In the shapes of our calls.
    engine_prefills : bool
        Prefill is the engine's; else ours.
    """

    options: dict[str, Any] = field(default_factory=dict)
    drafting: bool = False
    older_runner: bool = False
    seen: str = "pages of 64, bfloat16, planned"
    engine_prefills: bool = False


PREFILLS = {"prefill: cached tokens", "prefill: new tokens, merged"}
"""Seen of calls of our prefill: every step has prompts with a cached prefix."""
_DRAFTS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}
CASES = {
    "plain": Case(),
    "chunked": Case({"max_num_batched_tokens": 32}),
    "pages-of-16": Case({"block_size": 16}, seen="pages of 16, bfloat16, planned"),
    "float16": Case({"dtype": "float16"}, seen="pages of 64, float16, planned"),
    "fp8": Case({"kv_cache_dtype": "fp8"}, seen="pages of 64, float8_e4m3fn, planned"),
    "older-runner": Case(older_runner=True),
    "engine-prefills": Case(engine_prefills=True),
    "drafts": Case(_DRAFTS, drafting=True, seen="4, 16, 512), pages of 64, bfloat16, planned"),
    # The older runner's drafter has a backend of its own, and newer versions give both pages of 16.
    "drafts-older-runner": Case(_DRAFTS, drafting=True, older_runner=True, seen="4, 16, 512), pages of "),
}


def run(version: str, name: str, out: Path, timeout: int) -> dict[str, Any]:
    """Generate by the reference and by ours, and compare.

    Returns
    -------
    dict
        `passed`, and what was seen; with `error`, the end of a log, where a run failed.
    """
    from tests.engines.cpu.attention import REFERENCE

    case = CASES[name]
    out.mkdir(parents=True, exist_ok=True)
    found = []
    for backend in (REFERENCE, "CUSTOM"):
        result = out / f"vllm-{version}-{name}-{backend}.json"
        if error := _process(version, case, backend, result, timeout):
            return {"passed": False, "backend": backend, "error": error}
        found.append(json.loads(result.read_text()))
    return judged(case, *found)


def _process(version: str, case: Case, backend: str, result: Path, timeout: int) -> str:
    """Run one backend; returns what went wrong."""
    from tests.engines.model import build

    kind = "drafting" if case.drafting else "plain"
    model = build(packages.folder() / "models" / kind, drafting=case.drafting)
    given = {"model": str(model), "new": 12, "options": case.options}
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(packages.home("vllm", version)), str(REPOSITORY)]),
        "VLLM_USE_V2_MODEL_RUNNER": "0" if case.older_runner or version in MISORDERED else "1",
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "MLA_CUPY_ENGINE_PREFILL": "engine" if case.engine_prefills else "mla_cupy",
    }
    log = Path(f"{result}.log")
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.engines.cpu.run", backend, str(result), json.dumps(given)]
    with log.open("w") as file:
        try:
            where = {"env": environment, "cwd": result.parent, "stdout": file, "stderr": subprocess.STDOUT}
            subprocess.run(command, timeout=timeout, check=False, **where)
        except subprocess.TimeoutExpired:
            return f"more than {timeout} s: {log}"
    if result.exists():
        return ""
    lines = [x for x in log.read_text().splitlines() if "Error" in x and "Tokenizer" not in x]
    return f"{log}: {lines[-1] if lines else 'no result'}"


def judged(case: Case, reference: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Compare two runs: tokens are equal, or part where the two tokens were near."""
    found = compared(reference, ours)
    facts = ours["facts"]
    seen = any(case.seen in shape for shape in facts["shapes"])
    prefills = {x for x in facts["shapes"] if x.startswith("prefill")}
    ours_prefills = not prefills if case.engine_prefills else prefills >= PREFILLS
    cached = [sum(x["cached"] for x in told["rounds"][1]) for told in (reference, ours)]
    used = facts["implementation"]  # with the older runner a drafter has a backend of its own
    implementations = OURS in used and (case.drafting or len(used) == 1)
    partings = found["partings"]
    repeated = [between_rounds(told)["partings"] for told in (reference, ours)]
    near = all(x["gap"] <= NEAR for x in [*partings, *repeated[0], *repeated[1]])
    few = found["equal"] > len(partings)
    return {
        "passed": bool(near and few and seen and ours_prefills and cached[0] == cached[1] > 0 and implementations),
        **found,
        "partings_of_rounds": {"reference": repeated[0], "ours": repeated[1]},
        "cached_tokens": cached[1],
        "page_size": facts["page_size"],
        "second_runner": facts["second_runner"],
        "shapes": facts["shapes"],
    }


def between_rounds(told: dict[str, Any]) -> dict[str, Any]:
    """Compare a run with itself: its second round, from cached prefixes, with its first."""
    first, second = told["rounds"]
    return compared({"rounds": [first]}, {"rounds": [second]})


def compared(reference: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Number of equal sequences, divergences of the others, and how near the two tokens were there."""
    partings, equal, worst = [], 0, 0.0
    for number, (one, two) in enumerate(zip(reference["rounds"], other["rounds"], strict=True)):
        for prompt, (x, y) in enumerate(zip(one, two, strict=True)):
            step, difference = agreement(x, y)
            worst = max(worst, difference)
            equal += step is None
            if step is not None:
                partings.append({"round": number, "prompt": prompt, "step": step, "gap": gap(x, y, step)})
    of = equal + len(partings)
    return {"equal": equal, "of": of, "partings": partings, "max_logprob_difference": round(worst, 4)}


def agreement(one: dict[str, Any], two: dict[str, Any]) -> tuple[int | None, float]:
    """The step at which two sequences part, and the greatest difference of logprobs before it."""
    worst = 0.0
    for step, (x, y) in enumerate(zip(one["tokens"], two["tokens"], strict=True)):
        if x != y:
            return step, worst
        worst = max(worst, abs(one["logprobs"][step][str(x)] - two["logprobs"][step][str(y)]))
    return None, worst


def gap(one: dict[str, Any], two: dict[str, Any], step: int) -> float:
    """Distance of two tokens for the first run, at a step; infinite if it did not report it."""
    told = one["logprobs"][step]
    mine, other = str(one["tokens"][step]), str(two["tokens"][step])
    return round(told[mine] - told[other], 4) if other in told else float("inf")
