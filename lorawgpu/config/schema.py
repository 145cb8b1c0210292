"""The YAML schema of a training run: every key with its type, default and meaning.

Names are PEFT's and axolotl's; axolotl's other keys are translated or answered in `translate.py`, other tools' names in
`other_tools.py`. An unknown key is an error that names the nearest known one.

Paths: inputs (`base_model`, `adapter`, `lora_model_dir`, `datasets`, `test_datasets`, `chat_template_jinja`) are looked
up relative to the current directory, then to the config file; outputs (`output_dir`, `dataset_prepared_path`) are
relative to the current directory. In the resolved config all of them are absolute, so that it works from anywhere.
"""

import os
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from lorawgpu.chat.builtin import BUILT_IN, FALLBACK
from lorawgpu.config.schedule import schedule_options
from lorawgpu.config.types import (
    MAX_COUNT,
    Count,
    DataSets,
    Flag,
    Fraction,
    HeldOut,
    Interval,
    ModelOverrides,
    Names,
    NewTokens,
    NotNegative,
    Number,
    Positive,
    Section,
    Share,
    SpecialTokens,
    Targets,
    TemplateArguments,
    TokenIndices,
    TokenOverrides,
    WholeModules,
    as_list,
    off_of_yaml,
)
from lorawgpu.data.formats import ROLES
from lorawgpu.lora.peft_config import MAX_RANK
from lorawgpu.optim.schedule import SCHEDULES, options_of
from lorawgpu.optim.settings import AdamWSettings


class TrainConfig(Section):
    """One training run. Build it with `load_config`. Frozen, so that what was checked is what runs."""

    # Model
    base_model: str = Field(min_length=1)
    """A Hugging Face folder, a .gguf file, `builtin:NAME`, `ollama:NAME` or a hub name (owner/name)."""
    load_in_8bit: Flag = False
    """Quantize the linear layers of a dense model to 8.5 bits a weight as it is loaded (GGML's Q8_0)."""
    load_in_4bit: Flag = False
    """Or to 4.5 bits (GGML's Q4_0). A folder that another tool quantized to 4 bits is read as it is."""
    bnb_4bit_quant_type: Literal["nf4"] | None = None
    """With load_in_4bit: `nf4` for bitsandbytes' values, which have a larger error at the same size."""
    overrides_of_model_config: ModelOverrides = {}
    """What the model's files leave open: `hidden_act` and `i2_s_layout`. The run keeps it for its adapter."""
    adapter: str | None = None
    """`lora`, or `qlora` on a quantized model; or a PEFT adapter directory to continue from, like lora_model_dir."""
    lora_model_dir: str | None = None
    """A PEFT adapter directory to continue from; its rank, alpha and targets are kept."""
    lora_r: int = Field(16, ge=1, le=1 << 14)
    """Rank."""
    lora_alpha: int = Field(32, ge=1, le=MAX_RANK)
    """The adapter's output is scaled by alpha / r."""
    lora_dropout: Fraction = 0.0
    """Dropout probability of the adapter's input."""
    lora_target_modules: Targets = "all-linear"
    """Module names, or one regex of whole module paths, or `all-linear` for q, k, v, o, gate, up and down. Also
    `embed_tokens` and `lm_head`."""
    use_rslora: Flag = False
    """Scale by alpha / sqrt(r) instead."""
    lora_modules_to_save: WholeModules = []
    """Train `embed_tokens`, `lm_head` or both as a whole, in float32: four times their size, which the plan prints."""
    peft_trainable_token_indices: TokenIndices = {}
    """Or only the rows of these token ids: of `embed_tokens` (and a head tied to it), or a list for each of the two."""

    # Data
    datasets: DataSets = Field(min_length=1)
    """What to train on."""
    test_datasets: DataSets = []
    """What to evaluate on, as separate files."""
    val_set_size: HeldOut = 0
    """Or: hold out this many samples (from 1 on), or this fraction (below 1), of `datasets`. With neither, `valid`,
    `validation` or `dev` in a folder of `datasets` is held out."""
    dataset_prepared_path: str | None = None
    """Folder of the token cache; by default in the user's cache directory."""
    dataset_num_proc: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Tokenizing processes; by default one per core. The result is the same for any number."""
    chat_template: Literal[tuple(BUILT_IN) + tuple(FALLBACK + name for name in BUILT_IN)] | None = None
    """A built-in chat template instead of the model's own."""
    chat_template_jinja: str | None = None
    """A Jinja file, or the template itself, instead of the model's own."""
    chat_template_kwargs: TemplateArguments = {}
    """Variables of the chat template, such as `{enable_thinking: false}`; generation with the adapter uses them too."""
    special_tokens: SpecialTokens = SpecialTokens()
    """Other tokens of the vocabulary as BOS and EOS; generation with the adapter uses them too."""
    tokens: NewTokens = []
    """New tokens, whose rows of the embedding have to be trained. A table without room for them grows: by rows around
    the mean of the others, as in transformers. The tokenizer is saved with the adapter."""
    added_tokens_overrides: TokenOverrides = {}
    """Other spellings of added tokens by id, such as reserved ones of Llama 3."""
    train_on_inputs: Flag = False
    """Train on every token, including the prompts'."""
    roles_to_train: Annotated[list[Literal[ROLES]], BeforeValidator(as_list)] = Field(["assistant"], min_length=1)
    """Train on the turns of these roles."""
    sequence_len: int = Field(512, ge=2, le=MAX_COUNT)
    """Maximum length of a sample in tokens."""
    excess_length_strategy: Literal["truncate", "drop", "raise"] = "drop"
    """What to do with longer samples; they are always counted and reported."""
    sample_packing: Flag = False
    """Fill each micro-batch with as many whole samples as fit into micro_batch_size * sequence_len tokens."""

    # Optimization
    micro_batch_size: Count = 1
    """Samples per forward and backward pass."""
    gradient_accumulation_steps: Count = 1
    """Micro-batches per optimizer step, of each process (docs/scale-out.md)."""
    micro_batches_per_rank: Annotated[list[Count], Field(min_length=1)] | Literal["auto"] | None = None
    """With several processes: micro-batches per step of each one, instead; `auto` measures each device once."""
    exchange_timeout_s: Annotated[Positive, Field(ge=1, le=MAX_COUNT)] = 120.0
    """End the job if a process is silent for this long during a step."""
    num_epochs: Annotated[Positive, Field(le=10_000)] = 1.0
    """Passes over the data; may be fractional."""
    max_steps: Count | None = None
    """Optimizer steps; overrides num_epochs, as in transformers."""
    learning_rate: Positive = 2e-4
    """The peak learning rate."""
    lr_scheduler: Literal[tuple(SCHEDULES)] = "cosine"
    """After the warmup: constant, or a decay by transformers' formula of that name; rex: slow first, then fast."""
    lr_scheduler_kwargs: dict[str, Any] = {}
    """Options of the schedule, by transformers' names, such as `{num_cycles: 3}` for cosine_with_restarts."""
    cosine_min_lr_ratio: Share | None = None
    """cosine and rex: end at this fraction of the peak instead of 0."""
    cosine_constant_lr_ratio: Share | None = None
    """With cosine_min_lr_ratio: reach it after this fraction of all steps."""
    warmup_steps: int = Field(0, ge=0, le=MAX_COUNT)
    """Steps over which the learning rate rises linearly from 0."""
    warmup_ratio: Fraction = 0.0
    """Or: the same as a fraction of all steps."""
    weight_decay: NotNegative = AdamWSettings.weight_decay
    """AdamW's decoupled weight decay, on all adapter tensors."""
    adam_beta1: Fraction = AdamWSettings.beta1
    adam_beta2: Fraction = AdamWSettings.beta2
    adam_epsilon: Annotated[Number, Field(ge=1e-30)] = AdamWSettings.epsilon  # 0 in float32 divides 0 by 0
    max_grad_norm: NotNegative = AdamWSettings.max_grad_norm
    """Clip the global gradient norm to this; 0 disables clipping."""
    seed: int = Field(42, ge=0, lt=2**32)
    """For the adapter's initialization, the order of the data and dropout."""

    # Memory and device
    gradient_checkpointing: Flag = False
    """Keep only each layer's input and recompute the layer in the backward pass: about a third of the memory for a
    fifth more time."""
    attn_implementation: Literal["flash", "chain"] = "flash"
    """`chain` stores the scores of every head: slower, and a check of `flash`."""
    device: Annotated[str, BeforeValidator(lambda v: str(v) if type(v) is int else v)] | None = None
    """auto, cpu, gpu, an index or part of a name; by default LORAWGPU_DEVICE, or else auto."""
    matrix_cores: Annotated[Literal["auto", "off", "fast"] | None, BeforeValidator(off_of_yaml)] = None
    """Where the runtime grants matrix cores: `auto` uses them to float32's accuracy, `fast` rounds what they multiply
    to f16; by default LORAWGPU_MATRIX_CORES, or else auto."""
    max_dispatch_ms: Positive = 500.0
    """Split the GPU's work into submits of at most about this duration: Windows and macOS kill long ones."""

    # Logging and saving
    output_dir: str = Field("out", min_length=1)
    """The run directory: adapter, checkpoints, metrics, report."""
    logging_steps: Interval = 10
    """Steps between lines of metrics.jsonl, or a fraction of all steps; only then is the loss read from the GPU."""
    eval_steps: Interval | None = None
    """Steps between evaluations of the held-out data and the sample prompts, or a fraction of all steps; by default,
    each epoch ends with one."""
    evals_per_epoch: Count | None = None
    """Or: evaluations per epoch."""
    save_steps: Interval = 100
    """Steps between checkpoints, the most that a crash can cost; or a fraction of all steps."""
    saves_per_epoch: Count | None = None
    """Checkpoints per epoch; overrides save_steps."""
    save_total_limit: Count = 3
    """How many of the newest checkpoints to keep, in addition to the best one."""
    early_stopping_patience: Count | None = None
    """Stop after this many evaluations in a row without a better held-out loss."""
    max_bad_steps: Count = 10
    """Stop after this many steps in a row with a non-finite loss, hidden state or gradient."""
    sample_prompts: Names = []
    """Answered at each evaluation, for the log and the report."""
    report_to: Annotated[list[Literal["tensorboard", "wandb"]], BeforeValidator(as_list)] = []
    """Also send the metrics there."""
    wandb_project: str | None = None
    """W&B's project; by default WANDB_PROJECT, or else lorawgpu."""
    wandb_entity: str | None = None
    """W&B's user or team."""
    wandb_name: str | None = None
    """The name of the run at W&B; by default that of output_dir."""
    wandb_run_id: str | None = None
    """The id of the run at W&B, to continue it there."""
    wandb_mode: Literal["online", "offline", "disabled"] | None = None
    """Whether W&B sends the run at once, keeps it in the run folder, or neither."""

    @model_validator(mode="after")
    def _check_combinations(self, info: ValidationInfo):
        problems = self.combination_problems()
        if problems and not (info.context or {}).get("keys_alone"):
            raise ValueError("; ".join(text for _, text in problems))
        return self

    def combination_problems(self) -> list[tuple[set[str], str]]:
        """(keys involved, what is wrong) for values that are valid by themselves but not together."""
        rules = [
            (self.warmup_steps and self.warmup_ratio, {"warmup_steps", "warmup_ratio"},
             "warmup_steps and warmup_ratio are both set: set one of them to 0"),
            (self.max_steps and self.warmup_steps > self.max_steps, {"warmup_steps", "max_steps"},
             f"warmup_steps {self.warmup_steps} is more than max_steps {self.max_steps}: the warmup would never end"),
            (self.val_set_size and self.test_datasets, {"val_set_size", "test_datasets"},
             "val_set_size and test_datasets are both set: remove one of them"),
            (self.chat_template and self.chat_template_jinja, {"chat_template", "chat_template_jinja"},
             "chat_template and chat_template_jinja are both set: remove one of them"),
            (self.eval_steps and self.evals_per_epoch, {"eval_steps", "evals_per_epoch"},
             "eval_steps and evals_per_epoch are both set: remove one of them"),
            (self.load_in_4bit and self.load_in_8bit, {"load_in_4bit", "load_in_8bit"},
             "load_in_4bit and load_in_8bit are both set: remove one of them"),
            (self.bnb_4bit_quant_type and not self.load_in_4bit, {"bnb_4bit_quant_type", "load_in_4bit"},
             "bnb_4bit_quant_type is for load_in_4bit: set it, or remove bnb_4bit_quant_type"),
            (self.adapter == "qlora" and not (self.load_in_4bit or self.base_model.endswith(".gguf")),
             {"adapter", "load_in_4bit"},
             "adapter: qlora needs load_in_4bit: true; for a dense or ternary model, or one that is quantized already, "
             "set adapter: lora"),
            (self.lora_model_dir and self.adapter and self.adapter not in METHODS, {"adapter", "lora_model_dir"},
             "adapter and lora_model_dir are both folders: remove one of them"),
        ]  # fmt: skip
        folders = any(os.path.isdir(data_set.path) for data_set in self.datasets)  # which may hold validation files
        held_out = bool(self.val_set_size or self.test_datasets or folders)
        problems = [(keys, text) for broken, keys, text in rules if broken]
        return problems + self._schedule_problems() + self.evaluation_problems(held_out)

    def evaluation_problems(self, held_out: bool) -> list[tuple[set[str], str]]:
        """As `combination_problems`, of the keys that need something to evaluate. `held_out`: there are such data."""
        where = {"val_set_size", "test_datasets"}
        evals = "eval_steps" if self.eval_steps else "evals_per_epoch" if self.evals_per_epoch else None
        rules = [
            (evals and not (held_out or self.sample_prompts), {evals, *where},
             f"{evals} has nothing to evaluate: set val_set_size, test_datasets or sample_prompts"),
            (self.early_stopping_patience and not held_out, {"early_stopping_patience", *where},
             "early_stopping_patience needs held-out data: set val_set_size or test_datasets"),
        ]  # fmt: skip
        return [(keys, text) for broken, keys, text in rules if broken]

    def _schedule_problems(self) -> list[tuple[set[str], str]]:
        """Options that the schedule does not have, or of the wrong type."""
        kind, problems = self.lr_scheduler, []
        ratios = {key: value for key in COSINE_RATIOS if (value := getattr(self, key)) is not None}
        for key in ratios:
            if key not in options_of(kind):
                have = " and ".join(name for name in SCHEDULES if key in options_of(name))
                problems.append(({key, "lr_scheduler"}, f"{key} is for lr_scheduler {have}, not {kind}: remove it"))
        if "cosine_constant_lr_ratio" in ratios and "cosine_min_lr_ratio" not in ratios:
            problems.append(({*COSINE_RATIOS}, "cosine_constant_lr_ratio needs cosine_min_lr_ratio"))
        try:
            schedule_options(kind, self.lr_scheduler_kwargs, self.learning_rate)
        except ValueError as error:
            problems.append(({"lr_scheduler", "lr_scheduler_kwargs", "learning_rate"}, f"lr_scheduler {kind}: {error}"))
        return problems

    @property
    def lr_options(self) -> dict[str, Any]:
        """The options of the schedule. ValueError if `lr_scheduler_kwargs` does not fit it."""
        ratios = {key: value for key in COSINE_RATIOS if (value := getattr(self, key)) is not None}
        return schedule_options(self.lr_scheduler, self.lr_scheduler_kwargs, self.learning_rate) | ratios

    @property
    def start_from(self) -> str | None:
        """The folder of the adapter to continue from."""
        return self.lora_model_dir or (None if self.adapter in METHODS else self.adapter)

    @property
    def quantize_to(self) -> tuple[str, str] | None:
        """The store (ops/stores.py) that linear layers are quantized to, and the key that asks for it."""
        if self.load_in_8bit:
            return "q8_0", "load_in_8bit"
        return (self.bnb_4bit_quant_type or "q4_0", "load_in_4bit") if self.load_in_4bit else None

    def dump_yaml(self) -> str:
        """The resolved config as YAML with every key, which `load_config` reads back to an equal config.

        Left out are only keys that the adapter to continue from determines, unless the user set them.
        """
        kept_by_adapter = ADAPTER_KEYS - self.model_fields_set if self.start_from else set()
        return yaml.safe_dump(self.model_dump(exclude=kept_by_adapter), sort_keys=False, allow_unicode=True)

    def resume_identity(self) -> dict[str, Any]:
        """The settings that must not change on resume: they shape the adapter and the order of the data."""
        return {key: self.model_dump()[key] for key in sorted(RESUME_KEYS)}


COSINE_RATIOS = ("cosine_min_lr_ratio", "cosine_constant_lr_ratio")
METHODS = ("lora", "qlora")  # values of `adapter` that are no folder
ADAPTER_KEYS = {
    "lora_r", "lora_alpha", "lora_target_modules", "use_rslora", "lora_modules_to_save", "peft_trainable_token_indices",
}  # fmt: skip
RESUME_KEYS = ADAPTER_KEYS | {
    "lora_dropout", "tokens", "added_tokens_overrides",
    "val_set_size", "chat_template", "train_on_inputs", "roles_to_train", "sequence_len",
    "excess_length_strategy", "sample_packing", "micro_batch_size", "gradient_accumulation_steps", "seed",
}  # fmt: skip


def json_schema() -> dict[str, Any]:
    """The JSON schema of the config file, for editors."""
    schema = TrainConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return schema
