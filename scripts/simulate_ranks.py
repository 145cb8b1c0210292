"""Which network suffices for several processes: scripts/simulate_ranks.py [--rate 500] [--tokens 4096] [--ranks 2 4].

Replays the exchange of a step (lorawgpu/engine/shards.py) on a clock: gradients leave in pieces while the backward of
the layers below runs, each rank sums its part of a piece, and after the update the parameters go to all. It assumes
that all ranks are equally fast, that a network card sends and receives at its full rate at once, and that a GPU writes
what it receives while the next piece travels. `--rate` is what one card trains by itself, in tokens per second.
"""

import argparse
import itertools

from lorawgpu.engine.shards import pieces_of
from lorawgpu.families.modules import LINEAR_MODULES
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.weights.synthetic import SHAPES

MODELS = ("llama-3.2-1b", "bitnet-2b", "llama-3.2-3b", "llama-3.1-8b")
R = (8, 16, 32, 64)
# name: (bytes per second and direction, seconds until a message arrives)
NETWORKS = {
    "one box": (5e9, 2e-5),  # through shared memory
    "10 GbE": (1.15e9, 5e-5),
    "1 GbE": (1.15e8, 1e-4),
    "DSL 100/40": (4.5e6, 2e-2),  # what a line of 40 Mbit/s sends
}
FORWARD, BACKWARD = 1 / 3, 2 / 3  # of a step's time
HOST = 10e9  # bytes per second between GPU and host, and in sums on the host


def layout_of(model: str, r: int) -> AdapterLayout:
    return AdapterLayout(LoraConfig(r, 2 * r, LINEAR_MODULES), SHAPES[model])


def step_seconds(layout: AdapterLayout, compute: float, ranks: int, bandwidth: float, latency: float) -> float:
    """Seconds of a step whose forward and backward take `compute` on each of `ranks` ranks."""
    pieces, layers = pieces_of(layout), layout.model.num_hidden_layers
    sent = (ranks - 1) / ranks
    network = read = 0.0  # when each is free again
    for piece in pieces:
        nbytes = 4 * (piece.stop - piece.start)
        complete = compute * (FORWARD + BACKWARD * (layers - piece.layer) / layers)
        read = max(complete, read) + nbytes / HOST
        network = max(read, network) + nbytes * sent / bandwidth
    updated = max(compute, network + latency) + 4 * layout.size / ranks / HOST + latency  # the norm is gathered first
    return updated + 4 * layout.size * (sent / bandwidth + 1 / HOST) + latency


def sizes() -> list[list[str]]:
    """MB that a rank sends in a step, and receives, of two ranks; of many, it is twice that."""
    rows = [["model", *(f"r = {r}" for r in R)]]
    return rows + [[m, *(f"{4 * layout_of(m, r).size / 1e6:.0f} MB" for r in R)] for m in MODELS]


def speedups(rate: float, tokens: int, ranks: list[int], r: int) -> list[list[str]]:
    """How many times faster than one card, by model, network and number of ranks."""
    columns = list(itertools.product(NETWORKS, ranks))
    rows = [["model", *(f"{network}, {n} ranks" for network, n in columns)]]
    for model in MODELS:
        layout, compute = layout_of(model, r), tokens / rate
        row = [n * compute / step_seconds(layout, compute, n, *NETWORKS[network]) for network, n in columns]
        rows.append([model, *(f"{speedup:.2f}x" for speedup in row)])
    return rows


def table(rows: list[list[str]]) -> str:
    """In Markdown."""
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--rate", type=float, default=500.0, help="tokens per second of one card (default: 500)")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a rank in a step (default: 4096)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="(default: 2 4)")
    parser.add_argument("--r", type=int, default=16, help="rank of the adapter (default: 16)")
    args = parser.parse_args()
    print(f"{table(sizes())}\n\n{table(speedups(args.rate, args.tokens, args.ranks, args.r))}")
