"""What other tools call our keys: LLaMA-Factory, Unsloth's notebooks, transformers and TRL.

An error names our key for each of theirs, all in one message, so that a file of theirs is rewritten in one go.
"""

from typing import Any

from lorawgpu.config.source import ConfigProblem

RENAMED = {
    "adapter_name_or_path": "lora_model_dir", "additional_target": "lora_target_modules", "attn": "attn_implementation",
    "batch_size": "micro_batch_size", "cutoff_len": "sequence_len", "data_seed": "seed", "dataset": "datasets",
    "dataset_name": "datasets", "disable_gradient_checkpointing": "gradient_checkpointing", "epoch": "num_epochs",
    "epochs": "num_epochs", "eval_dataset": "test_datasets", "flash_attn": "attn_implementation",
    "loftq_config": "load_in_4bit", "lora_rank": "lora_r", "lora_target": "lora_target_modules",
    "lr": "learning_rate", "lr_scheduler_type": "lr_scheduler", "max_length": "sequence_len",
    "max_samples": "datasets", "max_seq_length": "sequence_len", "model": "base_model",
    "model_name": "base_model", "model_name_or_path": "base_model", "neat_packing": "sample_packing",
    "num_train_epochs": "num_epochs", "optim": "optimizer", "packing": "sample_packing",
    "per_device_train_batch_size": "micro_batch_size", "preprocessing_num_workers": "dataset_num_proc",
    "quantization_bit": "load_in_4bit", "r": "lora_r", "random_state": "seed", "rank": "lora_r",
    "run_name": "wandb_name", "target_modules": "lora_target_modules", "template": "chat_template",
    "tokenized_path": "dataset_prepared_path", "train_dataset": "datasets", "train_on_prompt": "train_on_inputs",
    "use_gradient_checkpointing": "gradient_checkpointing", "val_size": "val_set_size",
}  # fmt: skip
# What our key wants instead of their value, where that is not the same.
VALUES = {
    "additional_target": "a list of linear layers", "dataset": "[{path: FILE}]", "dataset_name": "[{path: FILE}]",
    "disable_gradient_checkpointing": "false", "eval_dataset": "[{path: FILE}]", "loftq_config": "true",
    "lora_target": "all-linear, or a list", "max_samples": "a file of so many lines", "quantization_bit": "true",
    "train_dataset": "[{path: FILE}]", "use_gradient_checkpointing": "true",
}  # fmt: skip
# What is so here anyway, or has no place here.
NEEDLESS = set("""
    bias compute_type dataset_dir dataset_text_field ddp_timeout do_eval do_train dtype enable_liger_kernel
    eval_on_start finetune_attention_modules finetune_language_layers finetune_mlp_modules finetune_vision_layers
    finetuning_type formatting_func full_finetuning mask_history overwrite_cache overwrite_output_dir
    per_device_eval_batch_size plot_loss predict_with_generate pure_bf16 quantization_device_map quantization_method
    stage task_type token upcast_layernorm use_cache use_fast_tokenizer use_unsloth
""".split())  # fmt: skip


def take_other_names(data: dict[str, Any]) -> tuple[list[ConfigProblem], set[str]]:
    """Take other tools' names out of `data`. One problem for all that are ours by another name, and one for all that
    are to be removed; and the keys of ours that were meant."""
    for key in [key for key, value in data.items() if value is None and key in (RENAMED.keys() | NEEDLESS)]:
        del data[key]  # an empty value asks for nothing
    theirs = {key: f"{RENAMED[key]}{f': {VALUES[key]}' if key in VALUES else ''}" for key in data if key in RENAMED}
    if "lora_rank" in theirs and "lora_alpha" not in data:
        rank = data["lora_rank"]
        theirs["lora_rank"] += f" and lora_alpha: {2 * rank if isinstance(rank, int) else 'twice the rank'}"
    needless = [key for key in data if key in NEEDLESS]
    renames = ", ".join(f"{key} -> {ours}" for key, ours in theirs.items())
    texts = [
        (list(theirs), "here it is " + "".join(theirs.values()), f"write instead: {renames}"),
        (needless, "not needed here, remove it", f"not needed here, remove {', '.join(needless)}"),
    ]
    problems = []
    for keys, one, many in texts:
        if keys:
            text = f"{keys[0]}: unknown key; {one}" if len(keys) == 1 else f"{len(keys)} keys of other tools: {many}"
            problems.append(ConfigProblem((keys[0],), text))
    for key in [*theirs, *needless]:
        del data[key]
    return problems, {RENAMED[key] for key in theirs}
