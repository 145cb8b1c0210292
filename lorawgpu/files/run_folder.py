"""The names of the files in a run folder, a checkpoint and an adapter. Imports nothing: everyone may import it."""

RUN_CONFIG_FILE = "config.yaml"  # the resolved config of the run
METRICS_FILE = "metrics.jsonl"
REPORT_FILE = "report.html"
LOCK_FILE = ".lock"

WEIGHTS_FILE = "adapter_model.safetensors"  # PEFT's names, in the run folder and in every checkpoint
ADAPTER_CONFIG_FILE = "adapter_config.json"

CHECKPOINT_PATTERN = r"checkpoint-(\d{1,12})"  # the number is that of the optimizer step
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "trainer_state.json"
SUMS_FILE = "SHA256SUMS"

TOKENIZER_FILE = "tokenizer.json"  # of a model folder, and of an adapter that adds tokens
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"  # of a model folder and of an export
MORE_TEMPLATES = "additional_chat_templates"  # there, the folder of templates by name
TOOL_USE_FILE = f"{MORE_TEMPLATES}/tool_use.jinja"


def checkpoint_name(step: int) -> str:
    return f"checkpoint-{step}"
