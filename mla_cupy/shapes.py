"""Sizes that are fixed in the kernels: DeepSeek's MLA, and the tile that schedules count in.

`attention/shapes.cuh` holds the same for the device; `tests/budgets` compares the facts of the cubins with these.
"""

from __future__ import annotations

D_V = 512
"""Width of the latent: the values are the first 512 elements of the keys."""
D_ROPE = 64
"""Width of the RoPE part of a key."""
D_QK = D_V + D_ROPE
"""Width of a key with its RoPE part."""
VALUE_WIDTHS = {D_QK: D_V, D_V: D_V, 320: 256, 288: 256}
"""Widths of dense decode's keys -> widths of their values: DeepSeek's, then smaller latents."""
D_HEADS = 128, 64, 192, 256
"""Widths of a head without RoPE, of keys and of values, before W_UK is absorbed and after W_UV."""
D_UNABSORBED = 192
"""Width of DeepSeek-V3's queries before W_UK is absorbed: 128 without RoPE and 64 with it. No kernel supports it."""
TILE_TOKENS = 64
"""Tokens of one step of a kernel, and the unit of the split-KV schedule."""
MAX_TOKENS = 2**31 - TILE_TOKENS
"""Longest list of tokens: kernels count them in int32, in tiles."""
MAX_INT32 = 2**31 - 1
"""Largest number of anything else that kernels count."""
