"""Does a GPU do what the simulator does? ``python -m simtest.golden COMMAND FOLDER``, in ptxsim/tests.

``build FOLDER`` writes every case (PTX and arguments), ``build FOLDER new`` only those without an output in h200.npz;
``record FOLDER`` runs them on a Hopper GPU; ``compare FOLDER`` says where the simulator differs from what was recorded;
``merge FOLDER`` adds the outputs to h200.npz. Only ``record`` needs the GPU, and nothing but NumPy beside it.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import numpy as np

from simtest.golden.case import FILE, differences, simulate


def compare(folder: Path) -> int:
    """Print where the simulator differs from a GPU's outputs; return in how many cases."""
    recorded, differing, compared = np.load(folder / FILE.name), 0, 0
    for case in pickle.loads((folder / "cases.pickle").read_bytes()):
        if f"{case.name} #0" not in recorded.files:
            continue
        found: list[str] = []
        for index, out in enumerate(simulate(case)):
            found += differences(case, out, recorded[f"{case.name} #{index}"])
        compared += 1
        differing += bool(found)
        print("\n".join(f"{case.name}: {each}" for each in found), end="\n" * bool(found))
    print(f"{compared} cases compared, {differing} differ")
    return differing


def main() -> int:
    """Build, record, compare or merge."""
    command, folder = sys.argv[1], Path(sys.argv[2])
    if command == "build":
        from simtest.golden.cases import cases

        known = np.load(FILE).files if "new" in sys.argv else []
        chosen = [case for case in cases() if f"{case.name} #0" not in known and f"{case.name} failed" not in known]
        for case in chosen:
            case.text()  # compiled here: the GPU's machine may have no compiler
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cases.pickle").write_bytes(pickle.dumps(chosen))
        print(f"{len(chosen)} cases")
    elif command == "merge":
        both = dict(np.load(FILE)) | dict(np.load(folder / FILE.name))
        FILE.unlink()
        np.savez_compressed(FILE, **both)
    elif command == "compare":
        return int(compare(folder) > 0)
    else:
        from simtest.golden.gpu import record

        record(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
