"""Other programs' names for config keys: TRL, PEFT, transformers, Axolotl, Unsloth."""

import re
from collections.abc import Container, Iterable

# Other programs' names of keys, with a value where the other name implies one. Names are looked up
# without their group.
_NAMES = {
    "adapter.alpha": "lora_alpha",
    "adapter.bits": "quantization_bit",
    "adapter.bits=8": "load_in_8bit",
    "adapter.double_quant": "bnb_4bit_use_double_quant",
    "adapter.dropout": "lora_dropout",
    "adapter.modules_to_save": "lora_modules_to_save",
    "adapter.quant_type": "bnb_4bit_quant_type",
    "adapter.r": "lora_r lora_rank rank",
    "adapter.target_modules": "lora_target_modules",
    "adapter.target_modules=all-linear": "lora_target_linear",
    "adapter.type": "finetuning_type",
    "adapter.type=lora": "use_peft",
    "adapter.type=none": "full_finetuning",
    "adapter.type=qlora": "load_in_4bit",
    "adapter.use_rslora": "peft_use_rslora",
    "checkpoint.keep_best=true": "load_best_model_at_end",
    "checkpoint.save_steps": "save_strategy saves_per_epoch",
    "data.eval_fraction": "val_set_size",
    "data.eval_path": "eval_dataset eval_file validation_file",
    "data.fields": "columns field_instruction field_messages field_output",
    "data.packing": "neat_packing packing_strategy padding_free sample_packing",
    "data.path": "dataset dataset_dir dataset_name train_file",
    "data.seed": "data_seed dataloader_seed",
    "data.sources": "datasets",
    "data.text_key": "dataset_text_field",
    "data.tokenizer": "tokenizer_name tokenizer_name_or_path",
    "data.train_on_source": "train_on_inputs",
    "data.train_on_source=false": (
        "assistant_only_loss completion_only_loss train_on_responses_only"
    ),
    "device": "device_map",
    "device=cpu": "no_cuda use_cpu",
    "execution.attention_implementation": (
        "attn_implementation flash_attention flash_attn sdp_attention"
    ),
    "execution.offload": "activation_offloading cpu_offload",
    "execution.remat": (
        "activation_checkpointing gradient_checkpointing gradient_checkpointing_kwargs "
        "use_gradient_checkpointing"
    ),
    "logging.report_to": "project_name wandb_project",
    "logging.steps": "logging_steps logging_strategy",
    "model.add_tokens": "special_tokens",
    "model.name_or_path": (
        "adapter_name_or_path base_model model_id model_name model_name_or_path "
        "pretrained_model_name_or_path"
    ),
    "model.rope_parameters": "rope_scaling rope_theta",
    "optimizer.learning_rate": "lr",
    "optimizer.lr_scheduler_type": "lr_scheduler",
    "optimizer.max_grad_norm": "gradient_clipping",
    "optimizer.type": "optim",
    "optimizer.warmup_steps": "warmup",
    "parallel.coordinator": "master_addr",
    "parallel.ep": "expert_parallel_size",
    "parallel.fsdp": "deepspeed fsdp_config",
    "parallel.num_processes": "nnodes world_size",
    "parallel.process_id": "local_rank",
    "parallel.sp": "context_parallel_degree context_parallel_size sequence_parallel_degree",
    "parallel.tp": "tensor_parallel_size",
    "run_dir": "checkpoint_dir output_dir resume_from_checkpoint",
    "seed": "random_state",
    "train.compute_dtype": "bnb_4bit_compute_dtype dtype mixed_precision torch_dtype",
    "train.compute_dtype=bfloat16": "bf16",
    "train.compute_dtype=float16": "fp16",
    "train.early_stopping_patience": "early_stopping",
    "train.epochs": "n_epochs num_epochs num_train_epochs",
    "train.eval_steps": "eval_strategy evals_per_epoch",
    "train.gradient_accumulation_steps": "grad_accum gradient_accumulation",
    "train.max_steps": "num_steps steps total_steps",
    "train.per_device_train_batch_size": (
        "batch_size eval_batch_size micro_batch_size per_device_batch_size "
        "per_device_eval_batch_size train_batch_size"
    ),
    "train.seq_len": (
        "block_size context_length cutoff_len max_length max_seq_len max_seq_length "
        "sequence_len sequence_length"
    ),
}
OTHER_NAMES = {name: key for key, names in _NAMES.items() for name in names.split()}
# Names in other programs, or in earlier versions, without a counterpart here, by the reason.
_REASONS = {
    "adapters have no biases": "bias",
    "the tokenizer has the chat template": "chat_template",
    "records are read and tokenized while the run trains": (
        "dataloader_num_workers dataset_num_proc preprocessing_num_workers streaming"
    ),
    "held-out data are evaluated": "do_eval",
    "bptjax train trains": "do_train",
    "bptjax has nothing of this kind": (
        "freeze_layers label_smoothing_factor neftune_noise_alpha unfrozen_parameters use_dora"
    ),
    "bptjax convert has --push_to_hub": "hub_model_id push_to_hub",
    "hf auth login saves the token": "hub_token",
    "the same command resumes a run": "overwrite_output_dir",
    "padding needs no token": "pad_token",
    "fields that no format names are not read": "remove_unused_columns",
    "exports are safetensors": "save_safetensors",
    "every step is compiled": "torch_compile use_liger_kernel",
    "evaluate has --tasks passkey --lengths N --samples N": "passkey_lengths depths trials",
    "code of a checkpoint never runs": "trust_remote_code",
}
NO_COUNTERPART = {name: why for why, names in _REASONS.items() for name in names.split()}
# Flags of generate and evaluate, by the key of train, or by another program's name where this says
# whether the directory is written or read.
FLAGS = {
    "data.eval_path": "data",
    "data.fields": "fields",
    "data.format": "format",
    "data.path": "data",
    "data.text_key": "text_key",
    "data.tokenizer": "tokenizer",
    "model.name_or_path": "model",
    "parallel.sp": "sp",
    "parallel.tp": "tp",
    "output_dir": "out",
    "run_dir": "model",
    "train.compute_dtype": "dtype",
    "train.eval_batches": "batches",
    "train.seq_len": "seq_len",
}
# Advice in errors about keys that have no flag, as a pattern, and what a command without a config
# says instead.
ADVICE = {
    r"set data\.bad_records=skip .*": "correct or remove the record",
    r", or set data\.too_long to .*": "",
    r"set objective\.type=kto, which reads it, or ": "set ",
}
# Key that a single value stands for when it is given instead of a group.
MAIN_KEYS = {
    "adapter": "adapter.type",
    "data": "data.path",
    "logging": "logging.report_to",
    "model": "model.name_or_path",
    "optimizer": "optimizer.type",
}


def own_name(name: str, names: Iterable[str]) -> str | None:
    """Returns the key among `names` that another program's key stands for, with any implied value:
    from the table, or the only key with the same last part."""
    keys = list(names)
    last = name.rpartition(".")[2]
    key, equals, value = OTHER_NAMES.get(last, "").partition("=")
    flag = FLAGS.get(name) or FLAGS.get(last) or FLAGS.get(key)
    if own := next((own for own in (key, flag) if own in keys), None):
        return own + equals + value
    # A name without a counterpart matches a key only together with its group.
    end = f".{name}" if last in NO_COUNTERPART else f".{last}"
    same = [own for own in keys if f".{own}".endswith(end) and name not in NO_COUNTERPART]
    return same[0] if len(same) == 1 else None


def with_flags(message: str, flags: Container[str]) -> str:
    """Replaces config keys in an error with the flags of a command, and advice about other keys."""
    for pattern, text in ADVICE.items():
        message = re.sub(pattern, text, message)
    for key, flag in FLAGS.items():
        if f"--{flag}" in flags and "." in key:
            message = re.sub(rf"(?<![\w./-]){re.escape(key)}(?!\w)", f"--{flag}", message)
    return message
