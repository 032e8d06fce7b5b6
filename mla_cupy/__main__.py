"""`python -m mla_cupy` is the command line."""

from mla_cupy.cli import main

raise SystemExit(main())
