#!/usr/bin/env bash
# On the machine with the GPU, from anywhere: unpacks the parcel that this lies in, and runs one list of checks.
#   bash PARCEL/run.sh dense_tokens|dense_speed|dense|sparse|few|sglang [FOLDER FOR RESULTS]
# Each check has a time limit of its own; what failed does not keep the rest from running. Afterwards the folder has
# NAME.log, the lines that were printed, and NAME.tgz, the results and logs of every process.
set -uo pipefail
name="$1"
results="${2:-${OUT:-$PWD}}"
parcel=$(cd "$(dirname "$0")" && pwd)
export MLA_ENGINES="${MLA_ENGINES:-/tmp/mla-engines-$(basename "$parcel")}"
out="$MLA_ENGINES/out-$name"
mkdir -p "$out" "$results"
bash "$parcel/setup.sh" || exit 1
# What has changed since the parcel was packed.
if [ -f "$parcel/changed.tgz" ]; then tar xzf "$parcel/changed.tgz" -C "$MLA_ENGINES/site"; fi
export PYTHONPATH="$MLA_ENGINES/site" PYTHONUNBUFFERED=1
cd "$MLA_ENGINES" || exit 1

check() {
    echo "== $* ($SECONDS s)"
    python3 -m tests.engines.gpu.check "$@" --out "$out" || echo "== status $?"
}

dense_tokens() {
    local at_once="--cache 8 --at-once 4 --timeout 150 --older-runner"
    # shellcheck disable=SC2086
    check tokens --graphs --heads 16 --backends TRITON_MLA,CUSTOM,CUSTOM:engine-prefill,FLASHMLA $at_once
    # shellcheck disable=SC2086
    check tokens --graphs --heads 16 --kv fp8 --backends TRITON_MLA,CUSTOM,CUSTOM:fp8-math,TRITON_MLA $at_once
}

dense_speed() {
    check speed --graphs --heads 128 --batch 64 --backends CUSTOM,CUSTOM:engine-prefill,FLASHMLA,FLASH_ATTN_MLA
    check speed --graphs --heads 16 --batch 64 --backends CUSTOM,FLASHMLA,FLASH_ATTN_MLA
    check speed --graphs --heads 128 --batch 1 --backends CUSTOM,FLASHMLA,FLASH_ATTN_MLA
}

dense() {
    dense_tokens
    dense_speed
}

sparse() {
    local at_once="--sparse --cache 8 --at-once 3 --timeout 180 --older-runner"
    local both="FLASHMLA_SPARSE,FLASHMLA_SPARSE:ours,FLASHMLA_SPARSE"
    # shellcheck disable=SC2086
    check tokens --graphs --heads 16 --kv fp8_ds_mla --backends "$both" $at_once
    # shellcheck disable=SC2086
    check tokens --graphs --heads 64 --kv fp8_ds_mla --backends "$both" $at_once
    # shellcheck disable=SC2086
    check tokens --graphs --heads 64 --kv auto --backends "$both" $at_once
    check speed --sparse --graphs --heads 16,128 --kv fp8_ds_mla --backends FLASHMLA_SPARSE:ours,FLASHMLA_SPARSE
}

# Steps of few requests. All processes start at once; each is timed alone.
few() {
    local how="speed --graphs --batch 1,4 --context 16384,4096 --layers 16 --trace" dense="CUSTOM,FLASHMLA,FLASH_ATTN_MLA"
    local at_once="--cache 2 --at-once 4 --timeout 500" sparse="--sparse --kv fp8_ds_mla --older-runner"
    local stock="FLASHMLA_SPARSE"
    # shellcheck disable=SC2086
    {
        check tokens --graphs $sparse $at_once --no-prefix-cache --heads 16 --backends "$stock:indexer:alone" &
        check $how $at_once --heads 128 --backends "$dense" &
        check $how $at_once --heads 16 --backends "$dense" &
        check $how $at_once $sparse --topk 2048 --heads 16 --backends "$stock,$stock:ours:indexer" &
        check $how $at_once $sparse --topk 2048 --heads 128 \
            --backends "$stock,$stock:ours,$stock:indexer,$stock:ours:indexer" &
        wait
    }
}

sglang_check() {
    echo "== $* ($SECONDS s)"
    python3 -m tests.engines.gpu.sglang_check "$@" --out "$out" || echo "== status $?"
}

sglang() {
    sglang_check --backends triton,mla_cupy --timeout 280 # its own kernels are compiled at first use
    sglang_check --graphs --backends triton,mla_cupy,flashmla --timeout 120
    sglang_check --graphs --kv fp8_e4m3 --backends triton,mla_cupy --timeout 100
    sglang_check --graphs --speed --backends mla_cupy,flashmla --timeout 100
}

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
cat site/MLA_CUPY_COMMIT
"$name" 2>&1 | tee "$results/$name.log"
tar czf "$results/$name.tgz" --exclude=models -C "$MLA_ENGINES" "out-$name"
echo "done in $SECONDS s"
