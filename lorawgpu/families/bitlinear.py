"""Read from `quantization_config` where a BitLinear matrix gets its scale."""

from lorawgpu.errors import UserError
from lorawgpu.families.keys import Keys
from lorawgpu.files.untrusted import brief

# What weights/formats.py reads.
READABLE = (
    "bitsandbytes' nf4, gptq, awq, compressed-tensors or MLX; or use the dense model (load_in_4bit: true quantizes it "
    "as it is loaded), or a GGUF"
)


def read_ternary(keys: Keys, required: bool) -> str | None:
    """How the file gives the scale `w`: `multiply`, `divide` or `online`; None for a dense model.

    Names and defaults are those of transformers' BitNetQuantConfig. UserError for any other quantization, and for a
    missing quantization_config if it is `required`.
    """
    settings, where = keys.data.get("quantization_config"), f"{keys.source}, quantization_config"
    if settings is None:
        if required:
            raise UserError(
                f"{keys.source}: a bitnet model needs a quantization_config (linear_class, quantization_mode), which "
                "this file lacks. If it was written by --to merged --dequantize, it is for evaluation by other tools: "
                "pass the ternary base instead, and the adapter with --adapter."
            )
        return None
    if not isinstance(settings, dict):
        raise UserError(f"{where}: wanted an object of settings, got {brief(settings)}.")
    method = settings.get("quant_method")
    if method != "bitnet":
        raise _unread(where, method, f"bitnet, {READABLE}")
    if settings.get("use_rms_norm"):
        raise UserError(f"{where}: use_rms_norm {brief(settings['use_rms_norm'])} is not supported; wanted false.")
    kept = settings.get("modules_to_not_convert") or []
    if not isinstance(kept, list) or not set(map(str, kept)) <= {"lm_head", "embed_tokens", "model.embed_tokens"}:
        raise UserError(f"{where}: modules_to_not_convert {brief(kept)} is not supported; wanted ['lm_head'].")
    mode, linear_class = settings.get("quantization_mode") or "offline", settings.get("linear_class")
    if linear_class not in (None, "bitlinear", "autobitlinear"):
        raise UserError(f"{where}: linear_class {brief(linear_class)} is not known; wanted bitlinear or autobitlinear.")
    if mode not in ("online", "offline"):
        raise UserError(f"{where}: quantization_mode {brief(mode)} is not known; wanted online or offline.")
    if mode == "online":
        if linear_class == "bitlinear":
            raise UserError(f"{where}: quantization_mode online needs linear_class autobitlinear, got bitlinear.")
        return "online"
    return "multiply" if linear_class == "autobitlinear" else "divide"


def refuse_quantized(keys: Keys) -> None:
    """UserError for a `quantization_config` in a family whose models are dense."""
    if (settings := keys.data.get("quantization_config")) is not None:
        method = settings.get("quant_method") if isinstance(settings, dict) else settings
        raise _unread(f"{keys.source}, quantization_config", method, READABLE)


def _unread(where: str, method: object, wanted: str) -> UserError:
    return UserError(f"{where}: quant_method {brief(method)} is not supported; wanted {wanted}.")
