"""Time loading a GGUF file of random blocks: seconds, weights per second, and host memory next to the mapped file.

    python scripts/bench_load.py [--device gpu] [--shape llama-3.1-8b] [--store q4_k_m] [--folder /tmp] [--repeat 2]

The file has the shape's size (llama-3.1-8b in q4_k_m: 4.9 GB), and is removed in the end. It is loaded right after it
was written, so it lies in the page cache.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np

from lorawgpu.families.config import ModelConfig
from lorawgpu.families.registry import FAMILIES
from lorawgpu.gpu import open_device
from lorawgpu.weights.device_model import load_model
from lorawgpu.weights.gguf_checkpoint import hf_name
from lorawgpu.weights.loader import open_checkpoint
from lorawgpu.weights.synthetic import MIXES, SHAPES, mix_of
from lorawgpu.weights.tensors import expected_tensors

POOL = 1 << 24  # weights that differ; a file repeats them
# Where the f16 scales of a block are, in bytes.
SCALES = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,),
          "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,)}  # fmt: skip


def write_gguf(path: Path, config: ModelConfig, type_of: Callable[[str], str], random: bool = True) -> int:
    """Write a model of this shape: the matrix `name` in GGML's type type_of(name), vectors in F32. Returns its weights.

    Without `random` the weights are a hole in a sparse file.
    """
    family, layer = FAMILIES[config.family], config.layers[0]
    writer = gguf.GGUFWriter(None, family.gguf.archs[0])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(layer.mlp.width)
    writer.add_head_count(layer.attention.heads)
    writer.add_head_count_kv(layer.attention.kv_heads)
    writer.add_key_length(layer.attention.head_dim)
    writer.add_value_length(layer.attention.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(layer.attention.rope.theta)
    kinds, ours = [], expected_tensors(config)
    for name in gguf_names(config):
        shape = ours[hf_name(name, family, config)]
        kind = gguf.GGMLQuantizationType[type_of(hf_name(name, family, config)).upper() if len(shape) > 1 else "F32"]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        kinds.append((kind.name, int(np.prod(shape)) // block * size))
        writer.add_tensor_info(name, shape, np.dtype(np.float32), kinds[-1][1], raw_dtype=kind)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    pools = {kind: random_blocks(kind) if random else b"" for kind in {kind for kind, _ in kinds}}
    file = writer.fout[0]
    for kind, nbytes in kinds:
        start = -(-file.tell() // 32) * 32
        for at in range(start, start + nbytes, len(pools[kind]) or nbytes):
            file.seek(at)
            file.write(pools[kind][: start + nbytes - at])
        file.seek(start + nbytes)
    file.truncate()
    writer.close()
    return sum(int(np.prod(shape)) for shape in ours.values())


def gguf_names(config: ModelConfig) -> list[str]:
    """The names of all tensors in the order of llama.cpp's converter."""
    below = [f"{name}.weight" for name in FAMILIES[config.family].gguf.layer_names]
    layers = [f"blk.{index}.{name}" for index in range(config.num_hidden_layers) for name in below]
    head = [] if config.tie_word_embeddings else ["output.weight"]
    return ["token_embd.weight", *layers, "output_norm.weight", *head]


def random_blocks(kind: str) -> bytes:
    """Random blocks of a type, with scales that are finite; ones for F32."""
    if kind == "F32":
        return np.ones(POOL >> 4, np.float32).tobytes()
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = np.random.default_rng(0).integers(0, 256, (POOL // block, size), np.uint8)
    for start in SCALES[kind]:
        raw[:, start + 1] &= 0x3F  # below 2
    return raw.tobytes()


class HostMemory:
    """The peak of this process's own memory, without mapped files, in bytes; on a CPU adapter without GPU buffers.

    Linux only.
    """

    def __init__(self, device):
        self.device, self.peak = device, 0

    def now(self) -> int:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
        own = sum(int(fields[key].split()[0]) << 10 for key in ("RssAnon", "RssShmem"))
        return own - (self.device.memory.total if self.device.is_cpu else 0)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Inside this context, measure a hundred times a second."""
        stop, before = threading.Event(), self.now()

        def sample():
            while not stop.wait(0.01):
                self.peak = max(self.peak, self.now() - before)

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def bench(args) -> None:
    config = SHAPES[args.shape]
    mix = mix_of(config, args.store) if args.store in MIXES else lambda name: args.store
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path, start = Path(folder) / f"{args.shape}-{args.store}.gguf", time.perf_counter()
        count = write_gguf(path, config, mix)
        size, seconds = path.stat().st_size, time.perf_counter() - start
        print(f"file       {args.shape}, {args.store}: {size / 1e9:.2f} GB, written in {seconds:.0f} s", flush=True)
        for _ in range(args.repeat):
            device = open_device(args.device)
            memory, start = HostMemory(device), time.perf_counter()
            with memory.watch():
                model = load_model(device, open_checkpoint(path))
            seconds = time.perf_counter() - start
            rate, host = count / seconds, memory.peak / 2**20
            print(f"loading    {seconds:.1f} s, {rate / 1e6:.0f} M weights/s, {size / seconds / 1e9:.2f} GB/s")
            print(f"           8.03 B weights would take {8.03e9 / rate:.0f} s; {device.name}")
            print(f"host       {host:.0f} MiB at most, next to the mapped file")
            print(f"device     {model.nbytes / 2**20:,.0f} MiB, {model.nbytes / size:.3f} x the file", flush=True)
            del model
            device.wgpu.destroy()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--store", default="q4_k_m", choices=[*MIXES, *(kind.lower() for kind in SCALES)])
    parser.add_argument("--folder", help="where the file is written; by default the system's folder for such files")
    parser.add_argument("--repeat", type=int, default=2)
    bench(parser.parse_args())


if __name__ == "__main__":
    main()
