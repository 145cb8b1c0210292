"""axolotl's keys that are not in our schema: what they ask for has no effect here, or is missing here.

The names are those of axolotl's documentation and examples. `config/translate.py` has those that become keys of ours;
a key that is in none of these tables nor in our schema is unknown.
"""


def _by_name(groups: dict[str, str]) -> dict[str, str]:
    return {name: text for text, names in groups.items() for name in names.split()}


# Read by nobody; a note lists those that a config sets. By the reason why they have no effect.
WITHOUT_EFFECT = _by_name({
    "activations, gradients and adapters are float32": """
        bf16 bfloat16 fp16 float16 float32 tf32 torch_dtype peft_autocast_adapter_dtype embeddings_skip_upcast
        fp32_norms""",
    "the kernels are our own": """
        flash_attention sdp_attention xformers_attention flex_attention eager_attention sage_attention
        flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_qkv flash_attn_fuse_mlp flash_optimum
        flex_attn_compile_kwargs fused_attn_kernel gemma4_hybrid_attn_impl use_kernels lora_mlp_kernel lora_qkv_kernel
        lora_o_kernel lora_embedding_kernel liger_rope liger_rms_norm liger_rms_norm_gated liger_layer_norm liger_swiglu
        liger_glu_activation liger_cross_entropy liger_fused_linear_cross_entropy liger_use_token_scaling
        unsloth_cross_entropy_loss unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o unsloth_rms_norm unsloth_rope
        cut_cross_entropy cut_cross_entropy_impl chunked_cross_entropy chunked_cross_entropy_num_chunks
        torch_compile torch_compile_backend torch_compile_mode tiled_mlp tiled_mlp_num_shards
        tiled_mlp_use_original_mlp heads_k_stride ring_attn_func experts_implementation use_scattermoe use_sonicmoe
        quantize_moe_experts llama4_linearized_experts dsv4_fp4_grouped_mode use_dsv4_kernels use_glm_dsa_kernels
        expert_parallel_num_nvl_bytes expert_parallel_token_capacity batch_flattening multipack_real_batches
        use_onebitllms""",
    "where values are kept is planned before the run": """
        gradient_checkpointing_kwargs activation_offloading layer_offloading low_cpu_mem_usage
        experimental_skip_move_to_device device_map max_memory gpu_memory_limit lora_on_cpu gc_steps
        dataset_keep_in_memory dataloader_pin_memory dataloader_num_workers dataloader_prefetch_factor torchdistx_path
        relora_cpu_offload qlora_sharded_model_loading""",
    "the model's own files decide": """
        model_type type_of_model tokenizer_type cls_model_config tokenizer_use_fast tokenizer_legacy
        tokenizer_save_jinja_files tokenizer_use_mistral_common trust_remote_code is_falcon_derived_model
        is_llama_derived_model is_mistral_derived_model is_qwen_derived_model""",
    "a table grows by the new tokens alone, by rows around the mean of the others": """
        resize_token_embeddings_to_32x mean_resizing_embeddings""",
    "embeddings have the adapter's learning rate": "loraplus_lr_embedding",
    "the end of a turn is found in the rendered conversation": "eot_tokens",
    "samples are not padded, and packing never mixes them": """
        pad_to_sequence_len eval_sample_packing eval_batch_size sample_packing_group_size sample_packing_bin_size
        sample_packing_mp_start_method sample_packing_eff_est group_by_length remove_unused_columns
        skip_prepare_dataset pretrain_multipack_buffer_size pretrain_multipack_attn streaming_multipack_buffer_size
        streaming preprocess_iterable dataloader_drop_last accelerator_config auto_find_batch_size
        shuffle_before_merging_datasets total_num_tokens total_supervised_tokens max_prompt_len""",
    "the run is one process": """
        local_rank world_size ddp ddp_timeout ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters
        use_ray ray_run_name ray_num_workers resources_per_worker fsdp_version""",
    "the adapter and its checkpoints stay in output_dir": """
        save_safetensors save_only_model hub_model_id hub_strategy hub_revision hf_use_auth_token push_dataset_to_hub
        load_best_model_at_end metric_for_best_model greater_is_better merge_lora merge_method nvfp4_merge_aware""",
    "metrics.jsonl, the report and report_to are what there is": """
        wandb_watch wandb_log_model use_mlflow mlflow_tracking_uri mlflow_experiment_name mlflow_run_name
        hf_mlflow_log_artifacts use_comet comet_api_key comet_workspace comet_project_name comet_experiment_key
        comet_mode comet_online comet_experiment_config use_swanlab swanlab_project swanlab_experiment_name
        swanlab_description swanlab_mode swanlab_workspace swanlab_api_host swanlab_web_host swanlab_log_model
        swanlab_log_completions swanlab_completion_log_interval swanlab_completion_max_buffer swanlab_lark_webhook_url
        swanlab_lark_secret use_trackio trackio_project_name trackio_run_name trackio_space_id use_otel_metrics
        otel_metrics_host otel_metrics_port profiler_steps profiler_steps_start include_tokens_per_second include_tkps
        eval_table_size eval_max_new_tokens generate_samples num_generation_samples generation_max_new_tokens
        do_causal_lm_eval eval_causal_lm_metrics do_bench_eval bench_dataset bench_split lm_eval_tasks gradio_title
        gradio_share gradio_server_name gradio_server_port gradio_max_new_tokens gradio_temperature
        loss_watchdog_threshold loss_watchdog_patience dynamic_checkpoint""",
    "of axolotl's own doing": "strict debug is_preprocess axolotl_config_path test_value",
})  # fmt: skip

# Refused, unless the value asks for nothing. By what is missing, and what to do.
MISSING = _by_name({
    "training across GPUs by sharding; remove it to train on one GPU": """
        deepspeed fsdp fsdp_config fsdp_final_state_dict_type dp_shard_size dp_replicate_size tensor_parallel_size
        context_parallel_size context_parapllel_size sequence_parallel_degree expert_parallel_size""",
    "training on preferences, rewards or rollouts; only supervised fine-tuning is here": """
        rl trl vllm ebft grpo rl_beta dpo_beta dpo_label_smoothing dpo_loss_type dpo_use_weighting
        dpo_use_logits_to_keep dpo_use_liger_kernel dpo_padding_free dpo_norm_loss dpo_generate_during_eval orpo_alpha
        rpo_alpha simpo_gamma cpo_alpha kto_desirable_weight kto_undesirable_weight reward_model process_reward_model
        num_labels center_rewards_coefficient""",
    "images and sound; remove it to train on text alone": """
        processor_type processor_config processor_kwargs image_size image_resize_algorithm freeze_mm_modules
        is_multimodal""",
    "training these weights of the model; lora_modules_to_save trains embed_tokens and lm_head": """
        unfrozen_parameters lora_target_parameters
        peft_ensure_weight_tying relora relora_steps relora_warmup_steps relora_anneal_steps relora_prune_ratio
        relora_prune_method lisa_n_layers lisa_step_interval lisa_layers_attribute reinit_weights optim_target_modules
        embedding_lr embedding_lr_scale""",
    "this form of LoRA; remove it for plain LoRA, or set use_rslora": """
        peft peft_use_dora peft_init_lora_weights peft_layer_replication loraplus_lr_ratio lora_fan_in_fan_out""",
    "a choice of layers by number; give a pattern of module paths as lora_target_modules": """
        peft_layers_to_transform peft_layers_pattern""",
    "this choice for the optimizer, which is AdamW with one learning rate; remove it": """
        optim_args lr_groups adam_epsilon2 adam_beta3""",
    "this schedule; remove it, or choose another lr_scheduler": """
        lr_quadratic_warmup lr_div_factor eta_min jagged_restart_steps jagged_restart_warmup_steps
        jagged_restart_anneal_steps""",
    "this objective; remove it to train with cross-entropy": """
        diffusion use_eaft eaft_alpha eaft_k use_dynamic_finetuning neftune_noise_alpha noisy_embedding_alpha
        scaling_softmax kd_trainer kd_alpha kd_ce_alpha kd_temperature kd_zscore_base_temp""",
    "this quantization; set load_in_4bit or load_in_8bit, or take a GGUF file as base_model": """
        qat quantization gptq gptq_disable_exllama llmcompressor model_quantization_config
        model_quantization_config_kwargs fp8 fp8_enable_fsdp_float8_all_gather""",
    "changing the model; save the changed model and give its folder as base_model": """
        model_kwargs overrides_of_model_kwargs rope_scaling use_pose
        pose_split_on_token_ids pose_max_context_len pose_num_chunks s2_attention""",
    "a revision, configuration or tokenizer that is not base_model's; download them into one folder and give that": """
        revision_of_model model_revision base_model_config tokenizer_config""",
    "a smaller embedding; remove it": "shrink_embeddings",
    "changing rows that the model never trained; train them with peft_trainable_token_indices": "fix_untrained_tokens",
    "a stream of text; list it under datasets with `type: text`": """
        pretraining_dataset pretraining_sample_concatenation""",
    "this order or choice of samples, which are shuffled in each epoch; remove it": """
        curriculum_sampling sample_packing_sequentially""",
    "this choice of samples; prepare the data before": """
        dataset_exact_deduplication dataset_shard_num dataset_shard_idx min_sample_len max_packed_sequence_len""",
    "a system message for chats without one; write it into the data": "default_system_message",
    "resuming by a key; use `lorawgpu train CONFIG --resume [DIR]`": """
        resume_from_checkpoint auto_resume_from_checkpoints""",
})  # fmt: skip

# The same of the keys of a data set.
DATA_WITHOUT_EFFECT = _by_name({
    "data are read as they are": "trust_remote_code preprocess_shards conversation",
})  # fmt: skip
DATA_MISSING = _by_name({
    "training on preferences or rewards; only supervised fine-tuning is here": """
        field_chosen field_rejected field_prompt field_label step_separator max_completion_length
        train_on_last_step_only logprobs_field temperature""",
    "this change of the data; write it into the data": """
        input_transform input_format message_field_training_detail field_human field_model""",
    "a template for one data set; set it for all, outside of datasets": "chat_template chat_template_jinja",
})  # fmt: skip

# Values that ask for nothing more than what is here, besides an empty value and false.
HARMLESS = {
    "dp_shard_size": 1, "dp_replicate_size": 1, "tensor_parallel_size": 1, "context_parallel_size": 1,
    "context_parapllel_size": 1, "sequence_parallel_degree": 1, "expert_parallel_size": 1,
    "peft_init_lora_weights": True,
}  # fmt: skip
