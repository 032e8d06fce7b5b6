"""The names of the families: of the modules beside this one."""

FAMILIES = (
    "decode",
    "records",
    "plans",
    "dense",
    "sparse",
    "sparse_records",
    "sparse_decode",
    "cache",
    "logits",
    "topk",
    "losses",
    "merge",
    "ends",
)
