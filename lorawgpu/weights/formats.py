"""Which quantized format a config.json declares, and its reader."""

from collections.abc import Callable

from lorawgpu.errors import UserError
from lorawgpu.weights.bitsandbytes import Nf4Tensors
from lorawgpu.weights.compressed_tensors import CompressedTensors
from lorawgpu.weights.gptq import AwqTensors, GptqTensors
from lorawgpu.weights.mlx import MlxTensors
from lorawgpu.weights.packed import Files, PackedTensors, Settings

DECLARED, MLX_DECLARED = "quantization_config", "quantization"
READERS: dict[str, Callable[[Files, Settings], PackedTensors]] = {
    "bitsandbytes": Nf4Tensors,
    "gptq": GptqTensors,
    "awq": AwqTensors,
    "compressed-tensors": CompressedTensors,
}


def format_of(config: dict) -> tuple[str, str] | None:
    """The format that a config.json declares, and the key that has its settings; None if we read no such format."""
    settings = config.get(DECLARED)
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if method is None and isinstance(config.get(MLX_DECLARED), dict):
        return "mlx", MLX_DECLARED
    if method is None and isinstance(settings, dict) and {"bits", "group_size"} <= settings.keys():
        return "mlx", DECLARED
    return (method, DECLARED) if method in READERS else None


def without_format(config: dict) -> dict:
    """A config.json as that of a dense model, if we read the format that it declares."""
    return {k: v for k, v in config.items() if k not in (DECLARED, MLX_DECLARED)} if format_of(config) else config


def packed_tensors(config: dict, files: Files, where: str) -> PackedTensors | None:
    """The quantized matrices among the tensors of a folder; None if its config.json, at `where`, declares none.

    UserError for settings that are not supported, and if no tensor is quantized.
    """
    if (found := format_of(config)) is None:
        return None
    method, key = found
    tensors = (READERS | {"mlx": MlxTensors})[method](files, Settings(config[key], f"{where}, {key}"))
    if not tensors.names:
        raise UserError(
            f"{where}: {key} declares {method}, but no tensor in the folder is quantized so; if the weights are dense, "
            f"remove {key} from the config."
        )
    return tensors
