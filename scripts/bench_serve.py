"""Time `lorawgpu serve`: one client, then many with two adapters at once, whose answers must be those of one alone.

    python scripts/bench_serve.py [--device gpu] [--shape smollm2-135m] [--clients 32] [--tokens 128] [--prompt 64]

A folder with random weights of a named shape, a tokenizer that has a word for every id, and two random adapters are
made, served by a process of its own, and asked over HTTP by threads that stream. First the decoder alone: one row, all
rows with one adapter, which is the least that a step of two adapters could take, and half of them with each.
"""

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import safetensors.numpy
import tokenizers

from lorawgpu.generate.batch import BatchDecoder, Row, cache_for, encode
from lorawgpu.generate.plans import Shared
from lorawgpu.generate.slots import Slots
from lorawgpu.gpu import KernelCache, open_device, padded
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import adapter_shapes, read_adapter, write_adapter
from lorawgpu.model.context import AdapterBuffers
from lorawgpu.weights.device_model import load_model
from lorawgpu.weights.loader import open_checkpoint
from lorawgpu.weights.published import CONFIGS

ADAPTERS = ("one", "two")


def make_model(folder: Path, shape: str, rank: int) -> None:
    """A Hugging Face folder with random float32 weights, and adapters next to it."""
    config, rng = CONFIGS[shape] | {"torch_dtype": "float32"}, np.random.default_rng(0)
    hidden, wide, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    head = config.get("head_dim", hidden // config["num_attention_heads"])
    queries, keys = (config[f"num_{k}_heads"] * head for k in ("attention", "key_value"))
    matrices = {"self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden),
                "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries),
                "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden),
                "mlp.down_proj": (hidden, wide)}  # fmt: skip
    tensors = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        tensors |= {f"model.layers.{i}.{name}.weight": size for name, size in matrices.items()}
        tensors |= {f"model.layers.{i}.{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}

    def values(size: tuple) -> np.ndarray:
        return np.ones(size, np.float32) if len(size) == 1 else random_matrix(rng, size)

    base = folder / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file({name: values(size) for name, size in tensors.items()}, base / "model.safetensors")
    save_tokenizer(base, vocab)
    model = open_checkpoint(base).config
    for seed, name in enumerate(ADAPTERS, 1):
        lora, rng = LoraConfig(rank, 2 * rank, model.all_linear()), np.random.default_rng(seed)
        factors = {n: random_matrix(rng, size) for n, size in adapter_shapes(lora, model).items()}
        write_adapter(folder / name, lora, factors, "base")


def random_matrix(rng, size: tuple) -> np.ndarray:
    return rng.standard_normal(size, np.float32) * np.float32(size[1] ** -0.5)


def save_tokenizer(folder: Path, vocab: int) -> None:
    """A word for each id, so that texts differ where ids do."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, vocab)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


class Client:
    """Asks for one completion as a stream. `first`: seconds to the first token; `text`: the answer."""

    def __init__(self, port: int, model: str, prompt: list[int], tokens: int):
        self.port, self.text, self.tokens, self.first = port, "", 0, None
        self.body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
                     "stream_options": {"include_usage": True}}  # fmt: skip

    def run(self) -> None:
        start, connection = time.perf_counter(), http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        connection.request("POST", "/v1/completions", json.dumps(self.body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"error: {response.status} {response.read()[:300]}")
        while line := response.readline():
            if not line.startswith(b"data: {"):
                continue
            part = json.loads(line[6:])
            if part["choices"] and part["choices"][0]["text"]:
                self.first = self.first or time.perf_counter() - start
                self.text += part["choices"][0]["text"]
            if part.get("usage"):
                self.tokens = part["usage"]["completion_tokens"]
        connection.close()


def together(clients: list[Client]) -> float:
    """Seconds in which all of them are answered, asked at once."""
    threads = [threading.Thread(target=client.run) for client in clients]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def over_http(args, folder: Path) -> None:
    command = [sys.executable, "-m", "lorawgpu.serve", "--model", str(folder / "base"), "--name", "base", "--port", "0"]
    command += [f"--adapter={name}={folder / name}" for name in ADAPTERS] + [
        "--context",
        str(args.prompt + args.tokens),
    ]
    command += ["--max-sequences", str(args.clients)] + (["--device", args.device] if args.device else [])
    command += ["--cache-tokens", str(args.clients * padded(args.prompt + args.tokens, 128))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            port = int(server.stdout.readline().rpartition(":")[2])
            rng = np.random.default_rng(3)
            prompts = [
                rng.integers(3, CONFIGS[args.shape]["vocab_size"], args.prompt - i % 7).tolist()
                for i in range(args.clients)
            ]

            def clients(adapters: tuple) -> list[Client]:
                named = [adapters[i % len(adapters)] for i in range(args.clients)]
                return [Client(port, n, p, args.tokens) for n, p in zip(named, prompts, strict=True)]

            alone = clients(ADAPTERS)
            together(clients(ADAPTERS))  # records the plans of all sizes
            seconds = [together([client]) for client in alone]
            one = [client.tokens / s for client, s in zip(alone, seconds, strict=True)]
            lone = float(np.median(one))
            first = np.median([client.first for client in alone]) * 1e3
            print(f"one client          {lone:8,.0f} tok/s (median of {len(one)}); first token after {first:.1f} ms")
            for adapters in (ADAPTERS, ADAPTERS[:1]):
                rates = []
                for _ in range(args.repeat):
                    many = clients(adapters)
                    rates.append(_rate(many))
                first = np.median([c.first for c in many]) * 1e3
                middle = float(np.median(rates))
                what = f"{args.clients} clients, {len(adapters)} adapter{'s' * (len(adapters) > 1)}"
                print(
                    f"{what:<19} {middle:8,.0f} tok/s (runs: {', '.join(f'{r:,.0f}' for r in rates)}), "
                    f"{middle / lone:.1f}x; first token after {first:.1f} ms"
                )
                if adapters == ADAPTERS:
                    same = sum(a.text == b.text for a, b in zip(alone, many, strict=True))
                    print(
                        f"equal answers       {same} of {args.clients}; {len({c.text for c in alone})} different ones"
                    )
                    if same < args.clients:
                        raise SystemExit("error: a batched answer differs from the lone one")
        finally:
            server.terminate()


def _rate(many: list[Client]) -> float:
    seconds = together(many)
    return sum(client.tokens for client in many) / seconds


def decoder_alone(args, folder: Path) -> None:
    """Milliseconds of a step of all rows, by how adapters share it."""
    device = open_device(args.device)
    kernels, checkpoint = KernelCache(device), open_checkpoint(folder / "base")
    model, room = load_model(device, checkpoint), args.prompt + args.tokens + 1
    shared = Shared.create(device, model, cache_for(device, model.config, 2 * args.clients * 1024), room, 512, kernels)
    decoders = []
    for name in ADAPTERS:
        lora, tensors = read_adapter(folder / name, model.config)
        layout = AdapterLayout(lora, model.config)
        decoders.append(BatchDecoder(shared, AdapterBuffers(layout, device.upload(layout.flatten(tensors)))))

    def rows(count: int, slots: Slots) -> list[Row]:
        return [
            Row(list(range(5, 5 + args.prompt)), slots=slots.take(room), done=args.prompt - 1) for _ in range(count)
        ]

    slots = Slots(shared.cache.span)
    ways = {
        "one row": [(decoders[0], rows(1, slots))],
        "all rows, 1 adapter": [(decoders[0], rows(args.clients, slots))],
        "all rows, 2 adapters": [(decoder, rows(args.clients // 2, slots)) for decoder in decoders],
    }
    for name, batches in ways.items():
        times = []
        for _ in range(5):
            for decoder, some in batches:
                decoder.begin(some)
            device.wait()
            start = time.perf_counter()
            for _ in range(4):
                device.submit(encode(batches, 4))
            encoded = time.perf_counter() - start
            device.wait()
            times.append(((time.perf_counter() - start) / 16, encoded / 16))
        step, encoded = min(times)
        count = sum(len(some) for _, some in batches)
        print(f"{name:<20} {step * 1e3:7.3f} ms a step ({encoded * 1e3:.3f} to encode it), {count / step:,.0f} tok/s")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device")
    parser.add_argument("--shape", default="smollm2-135m", choices=CONFIGS)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        make_model(Path(folder), args.shape, args.rank)
        print(f"{args.shape}, random weights in float32, rank {args.rank}, made in {time.perf_counter() - start:.1f} s")
        decoder_alone(args, Path(folder))
        over_http(args, Path(folder))


if __name__ == "__main__":
    main()
