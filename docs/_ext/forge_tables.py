"""The page `docs/kernels/tables.md`: generated tables for readers of the repository, where directives do not run.

`python3 docs/_ext/forge_tables.py` writes it.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "ptxsim")]

from kernel_choice import GPUS, SITUATIONS, chosen  # noqa: E402
from result_tables import table  # noqa: E402

from mla_cupy.cache_formats import FORMATS  # noqa: E402

PAGE = REPOSITORY / "docs" / "kernels" / "tables.md"
HEAD = """# Tables: kernels and cache formats

For readers of the repository. The site has the same tables and the rules behind them: [which
kernel](which-kernel.md), [the paged cache](../guides/paged-cache.md#formats). Written by
`python3 docs/_ext/forge_tables.py`.
"""


def page() -> str:
    """Text of the page."""
    logging.getLogger("mla_cupy").setLevel(logging.ERROR)  # the tables name slow kernels
    calls = [[label, *(chosen(pipeline, problem, gpu) for gpu in GPUS)] for label, pipeline, problem in SITUATIONS]
    formats = [[f"`{name}`", str(form.token_bytes), form.about] for name, form in FORMATS.items()]
    return "\n".join(
        [
            HEAD,
            "## Kernel of a call\n",
            table(["call", *(gpu.name for gpu in GPUS)], calls),
            "## Cache formats\n",
            table(["format", "bytes per token", "used by"], formats),
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page())
