"""Constants of `attention/split_schedule.cuh` and its headers, which explain the numbers.

Written by `python -m tools.generate`.
"""

from __future__ import annotations

MAX_SPLITS = 256
ITEM_COST = 3
PRICE_SCALE = 16384
SHORT_SPLIT = 4
