"""Other programs' names for config keys: TRL, PEFT, transformers, Axolotl, Unsloth."""

import re
from collections.abc import Container, Iterable

# Keys, with a value where the other name implies one. Names are looked up without their group.
OTHER_NAMES = {
    "activation_checkpointing": "execution.remat",
    "activation_offloading": "execution.offload",
    "adapter_name_or_path": "model.name_or_path",
    "assistant_only_loss": "data.train_on_source=false",
    "attn_implementation": "execution.attention_implementation",
    "base_model": "model.name_or_path",
    "batch_size": "train.per_device_train_batch_size",
    "bf16": "train.compute_dtype=bfloat16",
    "block_size": "train.seq_len",
    "bnb_4bit_compute_dtype": "train.compute_dtype",
    "bnb_4bit_quant_type": "adapter.quant_type",
    "bnb_4bit_use_double_quant": "adapter.double_quant",
    "checkpoint_dir": "run_dir",
    "completion_only_loss": "data.train_on_source=false",
    "context_length": "train.seq_len",
    "context_parallel_degree": "parallel.sp",
    "context_parallel_size": "parallel.sp",
    "cpu_offload": "execution.offload",
    "cutoff_len": "train.seq_len",
    "data_seed": "data.seed",
    "dataloader_seed": "data.seed",
    "dataset": "data.path",
    "dataset_dir": "data.path",
    "dataset_name": "data.path",
    "dataset_text_field": "data.text_key",
    "datasets": "data.sources",
    "deepspeed": "parallel.fsdp",
    "device_map": "device",
    "dtype": "train.compute_dtype",
    "early_stopping": "train.early_stopping_patience",
    "eval_batch_size": "train.per_device_train_batch_size",
    "eval_dataset": "data.eval_path",
    "eval_file": "data.eval_path",
    "eval_strategy": "train.eval_steps",
    "evals_per_epoch": "train.eval_steps",
    "expert_parallel_size": "parallel.ep",
    "finetuning_type": "adapter.type",
    "flash_attention": "execution.attention_implementation",
    "flash_attn": "execution.attention_implementation",
    "fp16": "train.compute_dtype=float16",
    "fsdp_config": "parallel.fsdp",
    "full_finetuning": "adapter.type=none",
    "grad_accum": "train.gradient_accumulation_steps",
    "gradient_accumulation": "train.gradient_accumulation_steps",
    "gradient_checkpointing": "execution.remat",
    "gradient_checkpointing_kwargs": "execution.remat",
    "gradient_clipping": "optimizer.max_grad_norm",
    "load_best_model_at_end": "checkpoint.keep_best=true",
    "load_in_4bit": "adapter.type=qlora",
    "load_in_8bit": "adapter.bits=8",
    "local_rank": "parallel.process_id",
    "logging_steps": "logging.steps",
    "logging_strategy": "logging.steps",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_modules_to_save": "adapter.modules_to_save",
    "lora_r": "adapter.r",
    "lora_rank": "adapter.r",
    "lora_target_linear": "adapter.target_modules=all-linear",
    "lora_target_modules": "adapter.target_modules",
    "lr": "optimizer.learning_rate",
    "lr_scheduler": "optimizer.lr_scheduler_type",
    "master_addr": "parallel.coordinator",
    "max_length": "train.seq_len",
    "max_seq_len": "train.seq_len",
    "max_seq_length": "train.seq_len",
    "micro_batch_size": "train.per_device_train_batch_size",
    "mixed_precision": "train.compute_dtype",
    "model_id": "model.name_or_path",
    "model_name": "model.name_or_path",
    "model_name_or_path": "model.name_or_path",
    "n_epochs": "train.epochs",
    "neat_packing": "data.packing",
    "nnodes": "parallel.num_processes",
    "no_cuda": "device=cpu",
    "num_epochs": "train.epochs",
    "num_steps": "train.max_steps",
    "num_train_epochs": "train.epochs",
    "optim": "optimizer.type",
    "output_dir": "run_dir",
    "packing_strategy": "data.packing",
    "padding_free": "data.packing",
    "peft_use_rslora": "adapter.use_rslora",
    "per_device_batch_size": "train.per_device_train_batch_size",
    "per_device_eval_batch_size": "train.per_device_train_batch_size",
    "pretrained_model_name_or_path": "model.name_or_path",
    "project_name": "logging.report_to",
    "quantization_bit": "adapter.bits",
    "random_state": "seed",
    "rank": "adapter.r",
    "resume_from_checkpoint": "run_dir",
    "rope_scaling": "model.rope_parameters",
    "rope_theta": "model.rope_parameters",
    "sample_packing": "data.packing",
    "save_strategy": "checkpoint.save_steps",
    "saves_per_epoch": "checkpoint.save_steps",
    "sdp_attention": "execution.attention_implementation",
    "sequence_len": "train.seq_len",
    "sequence_length": "train.seq_len",
    "sequence_parallel_degree": "parallel.sp",
    "special_tokens": "model.add_tokens",
    "steps": "train.max_steps",
    "tensor_parallel_size": "parallel.tp",
    "tokenizer_name": "data.tokenizer",
    "tokenizer_name_or_path": "data.tokenizer",
    "torch_dtype": "train.compute_dtype",
    "total_steps": "train.max_steps",
    "train_batch_size": "train.per_device_train_batch_size",
    "train_file": "data.path",
    "train_on_inputs": "data.train_on_source",
    "train_on_responses_only": "data.train_on_source=false",
    "use_cpu": "device=cpu",
    "use_gradient_checkpointing": "execution.remat",
    "use_peft": "adapter.type=lora",
    "val_set_size": "data.eval_fraction",
    "validation_file": "data.eval_path",
    "wandb_project": "logging.report_to",
    "warmup": "optimizer.warmup_steps",
    "world_size": "parallel.num_processes",
}
# Names in other programs without a counterpart here, with the reason.
_ABSENT, _UPLOADS = "bptjax has nothing of this kind", "bptjax uploads nothing"
_COMPILES, _READS = "every step is compiled", "records are read and tokenized while the run trains"
NO_COUNTERPART = {
    "bias": "adapters have no biases",
    "chat_template": "the tokenizer has the chat template",
    "dataloader_num_workers": _READS,
    "dataset_num_proc": _READS,
    "do_eval": "held-out data are evaluated",
    "do_train": "bptjax train trains",
    "freeze_layers": _ABSENT,
    "hub_model_id": _UPLOADS,
    "hub_token": _UPLOADS,
    "label_smoothing_factor": _ABSENT,
    "neftune_noise_alpha": _ABSENT,
    "overwrite_output_dir": "the same command resumes a run",
    "pad_token": "padding needs no token",
    "preprocessing_num_workers": _READS,
    "push_to_hub": _UPLOADS,
    "remove_unused_columns": "fields that no format names are not read",
    "save_safetensors": "exports are safetensors",
    "streaming": _READS,
    "torch_compile": _COMPILES,
    "trust_remote_code": "code of a checkpoint never runs",
    "unfrozen_parameters": _ABSENT,
    "use_dora": _ABSENT,
    "use_liger_kernel": _COMPILES,
}
# Flags of generate and evaluate, by the key of train, or by another program's name where this says
# whether the directory is written or read.
FLAGS = {
    "data.path": "data",
    "data.text_key": "text_key",
    "data.tokenizer": "tokenizer",
    "model.name_or_path": "model",
    "parallel.sp": "sp",
    "parallel.tp": "tp",
    "output_dir": "out",
    "run_dir": "model",
    "train.compute_dtype": "dtype",
    "train.seq_len": "length",
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
    """Replaces config keys in an error with the flags of a command."""
    if "--text_key" in flags:
        message = re.sub(r", or see data\.format", "", message)
    for key, flag in FLAGS.items():
        if f"--{flag}" in flags and "." in key:
            message = re.sub(rf"(?<![\w./-]){re.escape(key)}(?!\w)", f"--{flag}", message)
    return message
