"""Make the calls of some families, or of all: how long each takes, and how many there were."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from importlib import import_module

from mla_cupy import UnsupportedDeviceError
from tests.stress.sanitized import Call
from tests.stress.sanitized.families import FAMILIES


def outcome(call: Call) -> str:
    """Result of a run, in one word."""
    try:
        call.run()
    except UnsupportedDeviceError:
        return "not supported"
    except Exception:
        traceback.print_exc()
        return "FAILED"
    return "ok"


def main() -> int:
    """Go on after a failure: the others may say where it comes from."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help=f"of {', '.join(FAMILIES)}; all if none is given")
    parser.add_argument("--only", metavar="TEXT", default="", help="only calls whose name has it")
    parser.add_argument("--one-item", action="store_true", help="only where a block has one work item")
    arguments = parser.parse_args()
    outcomes = []
    for family in arguments.families or FAMILIES:
        for call in import_module(f"tests.stress.sanitized.{family}").calls():
            if arguments.only not in call.name or (arguments.one_item and not call.one_item):
                continue
            begin = time.perf_counter()
            outcomes.append(outcome(call))
            print(f"{time.perf_counter() - begin:7.2f} s  {outcomes[-1]:13}  {family}: {call.name}", flush=True)
    print(f"{outcomes.count('ok')} calls, {outcomes.count('not supported')} not supported")
    return int("FAILED" in outcomes or "ok" not in outcomes)


if __name__ == "__main__":
    sys.exit(main())
