"""Where the scale of a BitLinear matrix comes from, as `quantization_config` says."""

from lorawgpu.errors import UserError
from lorawgpu.families.keys import Keys
from lorawgpu.files.untrusted import brief


def read_ternary(keys: Keys, required: bool) -> str | None:
    """How `w` comes from the file: `multiply`, `divide`, `online`, or None for a dense model, unless one is `required`.

    Names and defaults are those of transformers' BitNetQuantConfig. UserError for any other quantization.
    """
    settings, where = keys.data.get("quantization_config"), f"{keys.source}, quantization_config"
    if settings is None:
        if required:
            raise UserError(
                f"{keys.source}: a bitnet model needs a quantization_config that says where its scales come from "
                "(linear_class, quantization_mode); this file has none. If --to merged --dequantize wrote it, it "
                "is for evaluation by other tools: here give the ternary base, and the adapter with --adapter."
            )
        return None
    if not isinstance(settings, dict):
        raise UserError(f"{where}: wanted an object of settings, got {brief(settings)}.")
    method = settings.get("quant_method")
    if method != "bitnet":
        raise UserError(f"{where}: quant_method {brief(method)} is not supported; supported is bitnet.")
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
