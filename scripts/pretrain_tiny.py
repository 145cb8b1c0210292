"""Train `builtin:tiny-bitnet` from scratch: a BitNet b1.58 with 2.9 million parameters (needs the `reference` extra).

    python scripts/tiny_corpus.py --docs FOLDER --out out/tiny          makes the text, the tokenizer, the chat data
    python scripts/pretrain_tiny.py --data out/tiny --out out/tiny-bitnet --seconds 100

Training is quantization-aware from the first step: each product uses ternary weights (absmean, one scale per matrix)
and int8 activations (absmax, one scale per token), and gradients pass straight through both. The weights are saved as
the products used them: in Hugging Face's packed format (`BitNetForCausalLM`, autobitlinear, offline), with norms and
embedding in bfloat16.

The code runs anywhere: an H200 that trained two of these at once processed 0.8 million tokens per second for each, two
slow cores a few hundred. The learning rate follows the clock: training takes `--seconds`, and is fully annealed however
short it is.
"""

import argparse
import json
import math
import shutil
import time
from pathlib import Path

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tiny_corpus import BOS, CONTEXT, CONTROL, END_OF_TURN, EOS, VOCABULARY
from torch import Tensor, nn

from lorawgpu.weights.tensors import Dense, pack_exact

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MIDDLE = 256, 4, 8, 2, 32, 512
EPS, THETA = 1e-5, 10000.0
BETAS, DECAY, WARMUP = (0.9, 0.95), 0.1, 0.02
PROMPTS = ("Return the", "The module provides", "If the file does not exist,")


def ternary(weight: Tensor) -> tuple[Tensor, Tensor]:
    """T in {-1, 0, 1} and w of a matrix: w = mean|W|, T = clamp(round(W/w)). w is rounded to bfloat16, as stored."""
    scale = weight.abs().mean().clamp(min=1e-5).bfloat16().float()
    return (weight / scale).round().clamp(-1, 1), scale


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """xq in -128..127 and s of each token: s = 127 / max|x|, xq = round(x*s)."""
    scale = 127 / x.detach().abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return (x.detach() * scale).round().clamp(-128, 127), scale


class TernaryProduct(torch.autograd.Function):
    """y = (xq . T^T) * w / s. Straight through both quantizers: dx = w * dy . T and dW = dy^T . (xq / s)."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, xq: Tensor, scale: Tensor) -> Tensor:
        codes, w = ternary(weight)
        ctx.save_for_backward(codes, w, xq, scale)
        return (xq @ codes.T) * (w / scale)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        codes, w, xq, scale = ctx.saved_tensors
        return (dy @ codes) * w, (dy.flatten(0, 1).T @ (xq / scale).flatten(0, 1)), None, None


class BitLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * 0.02)

    def forward(self, x: Tensor, quantized: tuple[Tensor, Tensor]) -> Tensor:
        return TernaryProduct.apply(x, self.weight, *quantized)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, EPS)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE, half-split: x [batch, heads, time, head_dim]."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = BitLinear(HIDDEN, HEADS * HEAD_DIM)
        self.k_proj = BitLinear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.v_proj = BitLinear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.o_proj = BitLinear(HEADS * HEAD_DIM, HIDDEN)
        self.attn_sub_norm = Norm(HEADS * HEAD_DIM)

    def forward(self, n: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        quantized = quantize(n)
        q, k, v = (
            proj(n, quantized).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        half = torch.bfloat16 if n.is_cuda else torch.float32  # the fast attention kernels are 16-bit
        q, k, v = (t.to(half) for t in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        a = self.attn_sub_norm(a.transpose(1, 2).flatten(2).float())
        return self.o_proj(a, quantize(a))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = BitLinear(HIDDEN, MIDDLE), BitLinear(HIDDEN, MIDDLE)
        self.down_proj = BitLinear(MIDDLE, HIDDEN)
        self.ffn_sub_norm = Norm(MIDDLE)

    def forward(self, h: Tensor) -> Tensor:
        quantized = quantize(h)
        m = self.ffn_sub_norm(F.relu(self.gate_proj(h, quantized)).square() * self.up_proj(h, quantized))
        return self.down_proj(m, quantize(m))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(HIDDEN), Norm(HIDDEN)
        self.self_attn, self.mlp = Attention(), MLP()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class BitNet(nn.Module):
    """Token ids [batch, time] to logits [batch, time, vocabulary]; parameters have Hugging Face's names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm(HIDDEN)
        angles = torch.outer(
            torch.arange(CONTEXT).double(), THETA ** -(torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
        )
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x, length = self.embed_tokens(ids), ids.shape[1]
        for block in self.layers:
            x = block(x, self.cos[:length], self.sin[:length])
        return self.norm(x) @ self.embed_tokens.weight.T


def progress_rate(progress: float) -> float:
    """The learning rate as a fraction of its peak, at `progress` in 0..1: a short warmup, then a linear decay to 0."""
    return min(progress / WARMUP, (1 - progress) / (1 - WARMUP), 1.0)


def train(model: BitNet, tokens: Tensor, options: argparse.Namespace) -> int:
    """Train for `options.seconds`. Returns the tokens seen. Weight decay ends halfway, as in BitNet's recipe."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=BETAS, fused=True)
    reach = torch.arange(CONTEXT + 1, device=tokens.device)
    started, step, progress = time.monotonic(), 0, 0.0
    while progress < 1:
        optimizer.param_groups[0]["weight_decay"] = DECAY if progress < 0.5 else 0.0
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * progress_rate(progress)
        starts = torch.randint(len(tokens) - CONTEXT, (options.batch, 1), device=tokens.device)
        ids = tokens[starts + reach]
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % options.log_every == 0:
            shown = loss.item()  # also synchronizes: otherwise the GPU falls behind the loop's clock
            seconds = time.monotonic() - started
            print(f"step {step}  {seconds:.0f} s  loss {shown:.3f}", flush=True)
        progress = (time.monotonic() - started) / options.seconds
    return step * options.batch * CONTEXT


@torch.no_grad()
def evaluate(model: BitNet, records: list[dict], device: torch.device) -> dict:
    """Mean loss over the held-out target tokens, perplexity, token count and loss sum."""
    total, targets = 0.0, 0
    for start in range(0, len(records), 32):
        rows = [record["input_ids"] for record in records[start : start + 32]]
        ids = torch.zeros(len(rows), CONTEXT, dtype=torch.long)
        labels = torch.full((len(rows), CONTEXT), -100)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row)
            labels[i, : len(row) - 1] = torch.tensor(row[1:])
        logits = model(ids.to(device)).flatten(0, 1)
        total += F.cross_entropy(logits, labels.to(device).flatten(), reduction="sum").item()
        targets += int((labels >= 0).sum())
    return {"loss": total / targets, "perplexity": math.exp(total / targets), "tokens": targets, "loss_sum": total}


@torch.no_grad()
def continuation(model: BitNet, tokenizer: tokenizers.Tokenizer, prompt: str, device: torch.device) -> str:
    """Greedy text after a prompt, at most 60 tokens."""
    ids = tokenizer.encode(prompt).ids
    ends = {tokenizer.token_to_id(EOS), tokenizer.token_to_id(END_OF_TURN)}
    for _ in range(60):
        ids.append(int(model(torch.tensor([ids], device=device))[0, -1].argmax()))
        if ids[-1] in ends:
            break
    return tokenizer.decode(ids, skip_special_tokens=False)


def save(model: BitNet, tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    """The model as Hugging Face stores a packed BitNet."""
    tensors = {}
    for name, parameter in model.cpu().state_dict().items():
        name = f"model.{name}"
        if name.endswith("_proj.weight"):
            codes, scale = ternary(parameter)
            tensors[name] = torch.from_numpy(pack_exact(Dense(codes.numpy(), "f32"), name))
            tensors[f"{name}_scale"] = scale.bfloat16().reshape(1)
        else:
            tensors[name] = parameter.bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ends = [tokenizer.token_to_id(EOS), tokenizer.token_to_id(END_OF_TURN)]
    config = {
        "architectures": ["BitNetForCausalLM"],
        "model_type": "bitnet",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": MIDDLE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT,
        "hidden_act": "relu2",
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": ends[0],
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "offline",
            "modules_to_not_convert": ["lm_head"],
        },
    }
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": ends}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("out/tiny"), help="output folder of tiny_corpus.py")
    parser.add_argument("--out", type=Path, default=Path("out/tiny-bitnet"))
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--batch", type=int, default=64, help=f"sequences of {CONTEXT} tokens per step (default 64)")
    parser.add_argument("--learning-rate", type=float, default=7e-3)
    parser.add_argument("--log-every", type=int, default=100, help="steps between log lines (default 100)")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")  # TF32 holds xq and T exactly, so the quantized products stay exact
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = tokenizers.Tokenizer.from_file(str(options.data / "model" / "tokenizer.json"))
    tokens = torch.from_numpy(np.fromfile(options.data / "train.bin", np.uint16).astype(np.int64)).to(device)
    held_out = [json.loads(line) for line in (options.data / "heldout.jsonl").read_text("utf-8").splitlines()]
    model = BitNet().to(device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokens):,} training tokens, on {device}")
    seen = train(model, tokens, options)
    for parameter in model.parameters():  # evaluate the values that will be stored
        if parameter.ndim == 1 or parameter.shape[0] == VOCABULARY:
            parameter.data = parameter.data.bfloat16().float()
    result = evaluate(model, held_out, device)
    size = sum(
        len(tokenizer.id_to_token(i)) for r in held_out for i in r["input_ids"][1:] if i < VOCABULARY - len(CONTROL)
    )
    result |= {"perplexity_per_byte": math.exp(result["loss_sum"] / size), "bytes": size, "tokens_seen": seen}
    print(json.dumps(result))
    for prompt in PROMPTS:
        print(continuation(model, tokenizer, prompt, device))
    shutil.copytree(options.data / "model", options.out, dirs_exist_ok=True)
    save(model, tokenizer, options.out)


if __name__ == "__main__":
    main()
