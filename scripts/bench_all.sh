#!/usr/bin/env bash
# Produces the figures in benchmarks/README.md, except Accuracy (lorawgpu.verify) and Data (bench_data.py), which need
# files that are not in the repository. Takes half an hour or more on a large GPU.  bash scripts/bench_all.sh [part]...
# Parts: training sequences peers families gemma4 quantized kernels generation serving; default: all. Training runs append to
# benchmarks/results.csv. TABLE: folder for Gemma 4's table of per-layer inputs, 4.4 GiB.
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

families() { # under nine minutes
    train --shape qwen3-0.6b gemma-3-1b qwen2.5-1.5b smollm3-3b --peer float32 bfloat16 --seconds 120
}

gemma4() { # the share of a step that goes into gathering and uploading per-layer inputs
    train --shape gemma-4-e2b --checkpointing --table "${TABLE:-/tmp}" --seconds 90
}

quantized() { # blocks beside bf16: one sequence of 1,024
    train --shape llama-3.1-8b llama-3.2-1b --store bf16 q4_k_m q8_0 --tokens 1024 --seq 1024 --checkpointing --seconds 120
    "$python" scripts/bench_generate.py --shape llama-3.1-8b --store bf16 q4_k_m --prompt 512 --tokens 128
    "$python" scripts/bench_load.py --shape llama-3.1-8b
}

kernels() {
    for shape in bitnet-2b smollm2-135m; do "$python" scripts/bench_ops.py --shape "$shape"; done
    for shape in gemma-4-e2b qwen3-0.6b qwen2.5-1.5b phi-4-mini; do
        "$python" scripts/bench_ops.py --shape "$shape" --kinds rows --warmup 1
    done
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

serving() {
    "$python" scripts/bench_serve.py
}

for part in "${@:-training sequences peers families gemma4 quantized kernels generation serving}"; do
    for name in $part; do "$name"; done
done
