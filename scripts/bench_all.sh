#!/usr/bin/env bash
# Produces the figures in benchmarks/README.md, except Accuracy (lorawgpu.verify) and Data (bench_data.py), which need
# files that are not in the repository. Takes ten minutes or more on a large GPU.  bash scripts/bench_all.sh [part]...
# Parts: training sequences peers kernels generation; default: all. Training runs append to benchmarks/results.csv.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

train() { "$python" scripts/bench_train.py --csv ${COMMIT:+--commit "$COMMIT"} "$@"; }

training() {
    train --shape bitnet-2b --tokens 4096 --profile
    train --shape bitnet-2b --tokens 4096 --checkpointing
    train --shape bitnet-2b --tokens 512
    train --shape bitnet-2b --tokens 512 --checkpointing
    train --shape smollm2-135m --store f32 --tokens 4096 --profile
    train --shape smollm2-135m --store f32 --tokens 512 --profile
}

sequences() { # one sequence per step
    for length in 128 256 1024 2048 4096 8192 16384; do
        train --shape bitnet-2b --tokens "$length" --seq "$length" --checkpointing --seconds 4
    done
}

peers() { # compared with transformers + PEFT in the same run
    train --shape bitnet-2b --tokens 4096 --peer float32 bfloat16
    train --shape bitnet-2b --tokens 4096 --checkpointing --peer bfloat16
    train --shape smollm2-135m --store f32 --tokens 4096 --peer float32 bfloat16
}

kernels() {
    "$python" scripts/bench_ops.py
    "$python" scripts/bench_ops.py --shape smollm2-135m
    local small="--heads 9 --kv-heads 3 --head-dim 64" # SmolLM2; the default is BitNet-2B
    "$python" scripts/bench_attention.py --tokens 4096 --seq 2048
    "$python" scripts/bench_attention.py --tokens 4096 --seq 2048 $small
    "$python" scripts/bench_attention.py --tokens 4096 --seq 512 $small
    "$python" scripts/bench_attention.py --tokens 512 --seq 512
    "$python" scripts/bench_attention.py --tokens 512 --seq 512 $small
}

generation() {
    "$python" scripts/bench_generate.py --shape bitnet-2b --prompt 512
    "$python" scripts/bench_generate.py --shape smollm2-135m --prompt 512
}

for part in "${@:-training sequences peers kernels generation}"; do
    for name in $part; do "$name"; done
done
