"""Training steps at the shapes of published models, with random weights made on the device.

LoRA on all linear layers, AdamW, clipping, every token a target. All stores of a shape, and whatever else is compared
with them, take turns in one process, together with a float32 product in our own tiles; the medians of their turns are
compared.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lorawgpu.bench.turns import Steps, TileRate, operations, rounds, spread
from lorawgpu.data.batching import Sample, flatten
from lorawgpu.engine.engine import Engine, Options
from lorawgpu.gpu import KernelCache, open_device, open_dry_device
from lorawgpu.gpu.profile import profile
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import adapter_shapes, init_adapter
from lorawgpu.ops.stores import TERNARY
from lorawgpu.optim.adamw import AdamW
from lorawgpu.weights.synthetic import MIXES, SHAPES, empty_model, mix_of, synthetic_model
from lorawgpu.weights.tensors import is_linear

RANK, TOKENS, SEQ = 16, 4096, 512
TABLE_BLOCK = 1 << 25  # elements of the random block that fills a table of per-layer inputs
GATHERS = 5


@dataclass(frozen=True)
class BenchSettings:
    """How shapes are trained and timed. `seconds`: a shape's budget, setup included; `turn`: about those of a turn."""

    tokens: int = TOKENS
    seq: int = SEQ
    rank: int = RANK
    attention: str = "flash"
    checkpointing: bool = False
    device: str | None = None
    table: Path | None = None
    seconds: float = 30.0
    turn: float = 2.0

    def lora(self, config) -> LoraConfig:
        return LoraConfig(r=self.rank, alpha=2 * self.rank, target_modules=config.all_linear())

    def options(self) -> Options:
        return Options(self.tokens, self.seq, checkpointing=self.checkpointing, attention=self.attention)


def needed_bytes(settings: BenchSettings, name: str, store: str) -> int:
    """GPU memory of a shape, from a dry run. DeviceError if a buffer is too large for the device."""
    device, config = open_dry_device(settings.device), SHAPES[name]
    dense = mix_of(config, store) if store in MIXES else lambda tensor: store

    def store_of(tensor: str) -> str:
        return TERNARY.name if config.ternary and is_linear(tensor) else dense(tensor)

    lora = settings.lora(config)
    start = {name: np.zeros(shape, np.float32) for name, shape in adapter_shapes(lora, config).items()}
    model = empty_model(device, config, store_of)
    Engine(device, model, settings.options(), AdapterLayout(lora, config), start, AdamW())
    return device.memory.total


def random_batch(config, tokens, seq, rng):
    """`tokens` random tokens in sequences of `seq`; all are targets except the first of each sequence."""
    samples = []
    for start in range(0, tokens, seq):
        ids = rng.integers(3, config.vocab_size, min(seq, tokens - start)).astype(np.int32)
        samples.append(Sample(ids, ids))
    return flatten(samples, tokens)


def per_layer_table(folder: Path, config) -> np.ndarray:
    """The table of per-layer inputs of a model's real size, memory-mapped; bf16 values of magnitude 0.5 to 1."""
    shape = (config.per_layer_vocab, config.per_layer_input * config.num_hidden_layers)
    path, size = folder / "per_layer_table.bin", 2 * shape[0] * shape[1]
    if not path.exists() or path.stat().st_size != size:
        folder.mkdir(parents=True, exist_ok=True)
        block = np.random.default_rng(0).integers(0, 1 << 16, min(TABLE_BLOCK, size // 2), np.uint16) & 0x807F | 0x3F00
        with path.open("wb") as file:
            for start in range(0, size // 2, len(block)):
                file.write(block[: size // 2 - start].data)
    return np.memmap(path, np.uint16, "r", shape=shape)


class Ours:
    """A model of random weights and its engine, after their first step."""

    def __init__(self, settings: BenchSettings, config, store: str):
        self.store, start = store, time.perf_counter()
        self.device = open_device(settings.device)
        self.kernels = KernelCache(self.device)
        model = synthetic_model(self.device, self.kernels, config, store)
        if config.per_layer_input and settings.table:
            table = per_layer_table(settings.table, config)
            model = replace(model, per_layer=replace(model.per_layer, gather=lambda ids: table[ids]))
        lora = settings.lora(config)
        adapter = AdapterLayout(lora, config), init_adapter(lora, config, 0)
        self.engine = Engine(self.device, model, settings.options(), *adapter, AdamW(), self.kernels)
        self.batch = random_batch(config, settings.tokens, settings.seq, np.random.default_rng(0))
        self.engine.step([self.batch], 1, 1e-4)
        self.first_loss = self.loss()
        self.held, self.peak_gib = dict(self.device.memory.held), self.device.memory.total / 2**30
        self.steps = Steps(self.engine, self.batch)
        self.turn = self.steps.turn
        print(f"{store}: setup and first step {time.perf_counter() - start:.1f} s", flush=True)

    def loss(self) -> float:
        return self.engine.loss_sum() / self.batch.targets

    def operations(self) -> float:
        return operations(self.engine.plan("train", self.batch.capacity), self.batch, self.engine.model.config.layers)

    def per_layer_seconds(self) -> float:
        """Median seconds to gather and upload the per-layer inputs of a batch of random tokens, nothing overlapping."""
        engine, rng, times = self.engine, np.random.default_rng(1), []
        for _ in range(GATHERS if engine.model.per_layer else 0):
            ids = rng.integers(0, engine.model.config.vocab_size, self.batch.capacity)
            self.device.wait()
            start = time.perf_counter()
            engine.batch.write_per_layer(self.device, engine.model, ids)
            self.device.wait()
            times.append(time.perf_counter() - start)
        return float(np.median(times)) if times else 0.0

    def gpu_waits(self) -> float | None:
        """The share of the time in which the GPU was idle; None without timestamps."""
        return round(self.steps.idle(), 3) if "timestamp-query" in self.device.capabilities.features else None

    def profile(self):
        recorded = self.engine.plan("train", self.batch.capacity)
        self.engine.begin()
        self.engine.write(self.batch)
        show_profile(profile(recorded.plan, recorded.sections(self.batch.targets)))

    def close(self):
        """Free the GPU's memory."""
        self.device.destroy()
        self.engine = self.steps = self.turn = None
        gc.collect()


def show_profile(kinds):
    total = sum(v[0] for v in kinds.values())
    print(f"{'GPU time by kind':44} {'ms':>9} {'share':>6} {'calls':>6} {'TFLOP/s':>8} {'TB/s':>6}")
    for kind, (seconds, count, flops, nbytes) in sorted(kinds.items(), key=lambda kv: -kv[1][0]):
        bound = "<" if kind.startswith("attention_flash") else ""  # its operations are an upper bound
        rate = f"{bound}{flops / seconds / 1e12:.1f}"
        print(
            f"{kind:44} {seconds * 1e3:9.2f} {seconds / total:6.1%} {count:6} {rate:>8} {nbytes / seconds / 1e12:6.2f}"
        )
    print(f"{'total':44} {total * 1e3:9.2f}", flush=True)


def measure_shape(
    settings: BenchSettings, name: str, stores: Sequence[str], others: Callable[[], dict] = dict, profiled: bool = False
) -> list[dict]:
    """Measure one shape; a record for each store. `others`: called after the stores are set up, what takes turns with
    them, by name, each with `turn` and `close`; their medians are under "others". Prints the details."""
    until = time.perf_counter() + settings.seconds
    ours = {store: Ours(settings, SHAPES[name], store) for store in stores}
    peers, first = others(), next(iter(ours.values()))
    turns = {"tiles": TileRate(first.device, first.kernels).turn}
    turns |= {key: contestant.turn for key, contestant in (ours | peers).items()}
    values = rounds(turns, settings.turn, until)
    for peer in peers.values():
        peer.close()
    medians = {peer: float(np.median(values[peer])) for peer in peers}
    records = [_record(settings, name, run, values, medians) for run in ours.values()]
    for run in ours.values():
        if profiled:
            run.profile()
        run.close()
    return records


def _record(settings: BenchSettings, name: str, run: Ours, values: dict, others: dict[str, float]) -> dict:
    """What was measured of one store. `spread`: how noisy its samples were."""
    flops, per_layer = run.operations(), run.per_layer_seconds()
    seconds, rate = (float(np.median(values[key])) for key in (run.store, "tiles"))
    made = {
        "adapter": run.device.name, "driver": run.device.driver, "shape": name, "tokens": settings.tokens,
        "seq": settings.seq, "store": run.store, "checkpointing": settings.checkpointing, "rank": settings.rank,
        "ms": round(seconds * 1e3, 2), "tok_s": round(settings.tokens / seconds), "peak_gib": round(run.peak_gib, 2),
        "encode_ms": round(float(np.median(run.steps.recording)) * 1e3, 2), "gpu_waits": run.gpu_waits(),
        "tflop": round(flops / 1e12, 3), "tile_tflop_s": round(rate / 1e12, 2),
        "over_tiles": round(seconds * rate / flops, 3), "spread": round(spread(values[run.store]), 4),
        "samples": len(values[run.store]), "others": others,
    }  # fmt: skip
    if run.engine.model.per_layer:
        made["per_layer_ms"] = round(per_layer * 1e3, 2)
        print(f"per-layer inputs: {per_layer * 1e3:.1f} ms to gather and upload, {per_layer / seconds:.1%} of a step")
    memory = ", ".join(f"{kind} {size / 2**30:.2f}" for kind, size in run.held.items())
    print(f"{name} {run.store}: loss {run.first_loss:.4f}, then {run.loss():.4f}; GiB: {memory}", flush=True)
    return made


def show_table(
    settings: BenchSettings, records: list[dict], head: str = "", beside: Callable[[dict], str] = lambda _: ""
):
    """Print a line for each record. `head` and `beside`: further columns."""
    checkpointing = ", checkpointing" if settings.checkpointing else ""
    print(f"\n{settings.tokens} tokens in sequences of {settings.seq}, r = {settings.rank}{checkpointing}")
    columns = f"{'ms':>8} {'tok/s':>7} {'GiB':>6} {'TFLOP':>7} {'tiles':>6} {'over':>5} {'idle':>6}"
    print(f"{'shape':20} {'store':7} {columns}{head}")
    for r in records:
        idle = "-" if r["gpu_waits"] is None else f"{r['gpu_waits']:.1%}"
        line = f"{r['shape']:20} {r['store']:7} {r['ms']:8.1f} {r['tok_s']:7,} {r['peak_gib']:6.2f} {r['tflop']:7.2f} "
        print(f"{line}{r['tile_tflop_s']:6.1f} {r['over_tiles']:5.2f} {idle:>6}{beside(r)}")
    print("tiles: TFLOP/s of a float32 product in our tiles; over: the step's time over that of its TFLOP at that rate")
