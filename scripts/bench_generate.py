"""Check and time decoding at a named shape with random weights: tokens per second, and time by kernel.

    python scripts/bench_generate.py [--device gpu] [--shape bitnet-2b] [--store bf16 q4_k_m] [--rank 16] [--prompt 128]

Random weights are as fast as trained ones. The one-token pass (matrix-vector products, flash decoding) must agree with
the whole-sequence pass; then prefill, decoding, and each kind of kernel in a step are timed.
"""

import argparse
import time
from collections import defaultdict
from dataclasses import replace

import numpy as np

from lorawgpu.families.config import ModelConfig
from lorawgpu.generate.decoder import Decoder
from lorawgpu.generate.generator import MAX_CHUNK, Generator
from lorawgpu.generate.sampling import Sampling
from lorawgpu.gpu import KernelCache, open_device
from lorawgpu.gpu.plan import dispatch
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import adapter_shapes
from lorawgpu.model.context import AdapterBuffers
from lorawgpu.weights.synthetic import DENSE_STORES, SHAPES, synthetic_model

CHECKED_LAYERS = 2


def random_adapter(device, config: ModelConfig, rank: int) -> AdapterBuffers | None:
    if not rank:
        return None
    lora, rng = LoraConfig(rank, 2 * rank, config.all_linear()), np.random.default_rng(1)
    layout = AdapterLayout(lora, config)
    tensors = {
        name: rng.standard_normal(shape, np.float32) * np.float32(0.3 * shape[1] ** -0.5)
        for name, shape in adapter_shapes(lora, config).items()
    }
    return AdapterBuffers(layout, device.upload(layout.flatten(tensors), label="adapter"))


def first_layers(model, count):
    """The model with its first `count` layers alone."""
    config, per_layer = replace(model.config, layers=model.config.layers[:count]), model.per_layer
    if per_layer:
        columns = count * config.per_layer_input
        per_layer = replace(per_layer, gather=lambda ids: model.per_layer.gather(ids)[:, :columns])
    return replace(model, config=config, layers=model.layers[:count], per_layer=per_layer)


def check(device, model, adapter, kernels, rng):
    """Run both passes on the same tokens through the first layers. Returns the relative difference of their logits.

    One flipped rounding in BitNet moves logits by 5e-3, and every layer of a random model amplifies that.
    """
    tokens = rng.integers(0, model.config.vocab_size, 12).tolist()
    short, logits = first_layers(model, CHECKED_LAYERS), []
    for matvec in (True, False):
        decoder = Decoder(device, short, adapter, context=128, prefill_rows=64, kernels=kernels, matvec=matvec)
        decoder.start([tokens[:4]])
        for token in tokens[4:]:
            decoder.extend([[token]])
        logits.append(decoder.read_logits(1)[0].astype(np.float64))
    return np.linalg.norm(logits[0] - logits[1]) / np.linalg.norm(logits[1])


def seconds_of(device, run, count):
    run()
    device.wait()
    start = time.perf_counter()
    for _ in range(count):
        run()
    device.wait()
    return (time.perf_counter() - start) / count


def by_kernel(device, records, repeat):
    """Seconds per step for each kind of kernel, running only its records, back to back.

    The sum differs from a whole step only by what overlaps.
    """
    kinds = defaultdict(list)
    for record in records:
        scopes = [part for part in record.label.split("/") if not part.startswith("layers.")]
        kinds["/".join(scopes).removesuffix(":main")].append(record)
    times = {}
    for kind, some in kinds.items():

        def run(some=some):
            encoder = device.wgpu.create_command_encoder()
            compute = encoder.begin_compute_pass()
            for record in some:
                dispatch(compute, record)
            compute.end()
            device.queue.submit([encoder.finish()])

        times[kind] = (len(some), seconds_of(device, run, repeat))
    return times


def weight_bytes(model, adapter) -> int:
    """The bytes that a token must read: all linear layers, the head and the adapter."""
    weights = [weight for layer in model.layers for weight in layer.weights.values()]
    return sum(w.nbytes for w in weights) + model.head.nbytes + (adapter.params.nbytes if adapter else 0)


def measure(args, device, model, adapter, kernels, rng):
    vocab = model.config.vocab_size
    sampling = Sampling(args.temperature, top_k=args.top_k, top_p=args.top_p)
    context = args.prompt + 2 * args.tokens + MAX_CHUNK
    decoder = Decoder(device, model, adapter, context=context, sequences=args.batch, kernels=kernels)
    prompts = [rng.integers(0, vocab, args.prompt).tolist() for _ in range(args.batch)]
    elapsed = min(seconds_of(device, lambda: decoder.start(prompts), 3) for _ in range(args.repeat))
    rate = args.batch * args.prompt / elapsed
    print(f"prefill     {args.batch} x {args.prompt}: {elapsed * 1e3:.1f} ms, {rate:,.0f} tok/s")
    rates, firsts = [], []
    for _ in range(args.repeat):
        generator, tokens, start, called = Generator(decoder, ()), 0, None, time.perf_counter()
        for _ in generator.stream(prompts, sampling, args.tokens):
            start = start or time.perf_counter()  # at the first token, prefill is done
            tokens += 1
        rates.append((tokens - args.batch) / (time.perf_counter() - start))
        firsts.append(start - called)
    print(f"first token {min(firsts) * 1e3:.1f} ms after the call")
    print(f"decode      {max(rates):,.1f} tok/s (runs: {', '.join(f'{r:,.1f}' for r in rates)})")
    plan = decoder.step_plan(args.batch)
    records = decoder.records(args.batch, sampling)
    start = time.perf_counter()
    for _ in range(10):
        decoder.encode(args.batch, 4, sampling)
    recording = (time.perf_counter() - start) / 40
    step = seconds_of(device, lambda: decoder.submit(decoder.encode(args.batch, 4, sampling)), 8) / 4
    floor = weight_bytes(model, adapter)
    each = len(plan.sections["forward"]) / len(model.layers)
    print(f"dispatches  {len(records)} per token, {each:.1f} per layer; {recording * 1e3:.2f} ms to encode a token")
    print(f"a step      {step * 1e3:.3f} ms; reads at least {floor / 1e6:.0f} MB, {floor / step / 1e9:,.0f} GB/s")
    for kind, (count, seconds) in sorted(by_kernel(device, records, args.repeat * 5).items(), key=lambda x: -x[1][1]):
        print(f"  {kind:28} {count:4} x {seconds / count * 1e6:8.2f} us = {seconds * 1e3:7.3f} ms")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device")
    parser.add_argument("--shape", default="bitnet-2b", choices=SHAPES)
    parser.add_argument("--store", choices=DENSE_STORES, nargs="+", default=["bf16"], help="stores of dense weights")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapter on all linear layers; 0: no adapter")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--repeat", type=int, default=4)
    args = parser.parse_args()
    for store in args.store:
        bench(args, store)


def bench(args, store):
    """Check and time the shape in one store."""
    device, rng = open_device(args.device), np.random.default_rng(2)
    kernels, start = KernelCache(device), time.perf_counter()
    model = synthetic_model(device, kernels, SHAPES[args.shape], store)
    adapter = random_adapter(device, model.config, args.rank)
    print(device.name, device.driver)
    device.wait()
    size, seconds = model.nbytes / 1e6, time.perf_counter() - start
    print(f"{args.shape} in {store}: {size:,.0f} MB, rank {args.rank}, made in {seconds:.1f} s")
    start = time.perf_counter()
    error = check(device, model, adapter, kernels, rng)
    bound = 5e-2 if model.config.ternary else 1e-4
    print(f"check       logits of the two passes differ by {error:.1e} ({time.perf_counter() - start:.1f} s)")
    if not error < bound:
        raise SystemExit(f"error: that is more than {bound:g}; nothing was timed")
    measure(args, device, model, adapter, kernels, rng)
    device.wgpu.destroy()


if __name__ == "__main__":
    main()
