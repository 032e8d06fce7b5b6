"""Small cases of each operation, which NumPy computes at once, the first one representative; and bad names."""

from __future__ import annotations

DECODE = "b2-sq2-hq3-skv20-page16"
LOSS = "b2-s7-h3x8-i2x32"
SPARSE = "sq3-skv128-hq2-topk20"
ANY_LISTS = "sq3-skv8-hq2-topk4"

SMALL: dict[str, tuple[str, ...]] = {
    "absorption": ("sq3-skv70-hq2",),
    "cache": (
        "append-v32-n70", "append-v4-n100", "append-bf16-n5", "gather-v32-n70", "gather-v4-n3", "copy-v32-n192",
    ),
    "cascade": ("b2-hq3-prefix64-suffix64",),
    "decode": ("b1-sq1-hq2-skv20-page16", "b3-sq2-hq10-skv100-page24"),
    "dense-decode-fp8": ("b1-sq1-hq2-skv20-page16", DECODE, f"{DECODE}-fp8"),
    "indexer-logits": (
        "sq3-skv20-h2-d32", "sq5-skv9-h3-full", "sq4-skv10-h2-bf16", "sq3-skv20-h2-float16", "b2-sq2-skv70-h2",
        "b2-sq2-skv70-h2-e2m1",
    ),
    "indexer-loss": (
        LOSS, f"{LOSS}-k4", "b2-s7-h2x8-i2x32-perhead", f"{LOSS}-k4-fp8", "b2-s7-h3x72-i2x32-mha-fp8",
    ),
    "indexer-prepare": ("sq5-h3-d32", "sq2-h1-d64", "sq1-h2", "sq5-h3-d32-keys"),
    "indexer-topk": ("sq5-skv40-k7", "sq300-skv90-k90-hot", "sq1-skv33-k1"),
    "layer": ("v3-hq2-b2-skv70", "k3-hq3-b2-skv5", "v4flash-hq2-b1-skv70"),
    "prefill": ("b2-sq3-skv8-hq2", "b2-sq3-skv5-hq2-fp8"),
    "prefill-backward": ("b2-sq3-skv8-hq2",),
    "prepare": (
        "codes-fp8-n70-h2", "new-v4-n5-h3", "inplace-v32-n3-h2-theta", "inplace-bf16-n2-h1", "codes-none-n3-h2",
    ),
    "projection": ("absorb-t3-hq2", "project-n1-t2-hq2", "project-n3-t2-hq1"),
    "sparse-backward": (ANY_LISTS, f"{ANY_LISTS}-dqk512-clustered"),
    "sparse-decode": (
        "b2-sq2-hq3-topk5-pool128", "b1-sq1-hq2-topk4-extra3-v4-pool64", "b1-sq1-hq2-topk4-extra3-v41-pool64",
        "b1-sq1-hq2-topk4-extra3-v41-fp4-pool64", "b1-sq2-hq2-topk4-fp8-pool64",
        "b1-sq1-hq2-topk4-extra3-v32-nope-pool64",
    ),
    "sparse-forward": (ANY_LISTS, f"{ANY_LISTS}-dqk512-clustered"),
    "sparse-forward-fp8": (SPARSE, f"{SPARSE}-dqk512", f"{SPARSE}-fp8-math"),
}  # fmt: skip

BAD: dict[str, tuple[str, ...]] = {
    "absorption": ("sq3-skv2-hq2", "sq0-skv2-hq2", "b1-sq3-skv70-hq2"),
    "cache": ("append-v32", "move-v32-n64", "append-v5-n64", "append-fp8-n64", "copy-v32-n65"),
    "cascade": ("b2-hq3-prefix64", "b2-hq3-prefix65-suffix64", "b0-hq3-prefix64-suffix64"),
    "decode": ("b1", "b1-sq1-hq128", "b0-sq1-hq1-skv1", "b1-sq1-hq2-skv9-hkv2", "xb1-sq1-hq1-skv1"),
    "dense-decode-fp8": ("b1-sq1-hq2-skv20-dqk512",),
    "indexer-logits": (
        "sq1-skv1", "sq0-skv1-h1", "sq1-skv1-h1-d48", "b0-sq1-skv1-h1", "b1-sq1-skv1-h1-full",
        "sq1-skv1-h1-e2m1",
    ),
    "indexer-loss": (
        "b1-s1-h1x1", "b0-s1-h1x1-i1x32", "b1-s1-h1x577-i1x32", "b1-s1-h1x1-i1x48", "b1-s1-h1x1-i1x32-k0",
        "b1-s1-h2x1-i1x32-perhead", "b1-s1-h1x1-i1x32-perhead-k4", "b1-s1-h1x64-i1x32-mha", "b1-s1-h1x72-i1x32-k4-mha",
    ),
    "indexer-prepare": ("sq1", "sq0-h1", "sq1-h1-d48"),
    "indexer-topk": ("sq1-skv9", "sq0-skv9-k1", "sq1-skv9-k10", "sq1-skv9000-k8193"),
    "layer": ("v3-hq16", "v5-hq16-b1-skv64", "v3-hq0-b1-skv64"),
    "prefill-backward": ("b2-sq3-skv5-hq2-fp8",),
    "prepare": ("codes-fp8", "move-v32-n64-h1", "codes-v5-n64-h1", "codes-fp8-n0-h1"),
    "projection": ("absorb-t3", "project-t3-hq4", "project-n0-t3-hq4", "absorb-t0-hq4"),
    "sparse-decode": (
        "b1-sq1-hq1", "b0-sq1-hq1-topk1", "b1-sq1-hq1-topk1-pool65", "b1-sq1-hq1-topk1-v5",
        "b1-sq1-hq1-topk1-extra1-fp8",
    ),
    "sparse-forward": ("sq1-skv1-hq1", "sq1-skv0-hq1-topk1", "sq1-skv1-hq1-topk1-dqk64", "b1-sq1"),
    "sparse-forward-fp8": ("sq3-skv100-hq2-topk20", "sq3-skv128-hq2-topk20-dqk512-fp8-math"),
}  # fmt: skip
