"""Names that other programs have for config keys: TRL, PEFT, transformers, Axolotl, Unsloth."""

import re
from collections.abc import Container, Iterable

# Keys, with a value where the other name stands for one. Names are looked up without their group.
OTHER_NAMES = {
    "assistant_only_loss": "data.train_on_source=false",
    "attn_implementation": "execution.attention_implementation",
    "base_model": "model.name_or_path",
    "batch_size": "train.per_device_train_batch_size",
    "bf16": "train.compute_dtype=bfloat16",
    "block_size": "train.seq_len",
    "bnb_4bit_compute_dtype": "train.compute_dtype",
    "bnb_4bit_quant_type": "adapter.quant_type",
    "bnb_4bit_use_double_quant": "adapter.double_quant",
    "completion_only_loss": "data.train_on_source=false",
    "context_length": "train.seq_len",
    "context_parallel_size": "parallel.sp",
    "cutoff_len": "train.seq_len",
    "dataloader_seed": "data.seed",
    "dataset": "data.path",
    "dataset_name": "data.path",
    "dataset_prepared_path": "data.path",
    "dataset_text_field": "data.text_key",
    "datasets": "data.sources",
    "early_stopping": "train.early_stopping_patience",
    "eval_dataset": "data.eval_path",
    "eval_file": "data.eval_path",
    "eval_max_new_tokens": "train.sample_tokens",
    "eval_strategy": "train.eval_steps",
    "evals_per_epoch": "train.eval_steps",
    "expert_parallel_size": "parallel.ep",
    "flash_attention": "execution.attention_implementation",
    "flash_attn": "execution.attention_implementation",
    "fp16": "train.compute_dtype=float16",
    "full_finetuning": "adapter.type=none",
    "grad_accum": "train.gradient_accumulation_steps",
    "gradient_accumulation": "train.gradient_accumulation_steps",
    "gradient_checkpointing": "execution.remat",
    "gradient_clipping": "optimizer.max_grad_norm",
    "load_best_model_at_end": "checkpoint.keep_best=true",
    "load_in_4bit": "adapter.type=qlora",
    "load_in_8bit": "adapter.bits=8",
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
    "max_length": "train.seq_len",
    "max_seq_len": "train.seq_len",
    "max_seq_length": "train.seq_len",
    "micro_batch_size": "train.per_device_train_batch_size",
    "model_id": "model.name_or_path",
    "model_name": "model.name_or_path",
    "model_name_or_path": "model.name_or_path",
    "n_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "num_steps": "train.max_steps",
    "num_train_epochs": "train.epochs",
    "optim": "optimizer.type",
    "output_dir": "run_dir",
    "peft_use_rslora": "adapter.use_rslora",
    "per_device_batch_size": "train.per_device_train_batch_size",
    "pretrained_model_name_or_path": "model.name_or_path",
    "project_name": "logging.report_to",
    "random_state": "seed",
    "rank": "adapter.r",
    "resume_from_checkpoint": "run_dir",
    "rope_scaling": "model.rope_parameters",
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
    "use_gradient_checkpointing": "execution.remat",
    "val_set_size": "data.eval_fraction",
    "validation_file": "data.eval_path",
    "wandb_project": "logging.report_to",
    "warmup": "optimizer.warmup_steps",
}
# Flags of generate and evaluate that are config keys of train.
FLAGS = {
    "data.path": "data",
    "data.text_key": "text_key",
    "data.tokenizer": "tokenizer",
    "model.name_or_path": "model",
    "parallel.sp": "sp",
    "parallel.tp": "tp",
    "run_dir": "out",
    "train.compute_dtype": "dtype",
    "train.seq_len": "length",
}
# The key of a group that a single value in place of the group stands for.
MAIN_KEYS = {
    "adapter": "adapter.type",
    "data": "data.path",
    "logging": "logging.report_to",
    "model": "model.name_or_path",
    "optimizer": "optimizer.type",
}


def own_name(name: str, names: Iterable[str]) -> str | None:
    """Returns the key among `names` that a key of another program stands for, with its value if it
    stands for one: from the table, or with the same last part in the only group that has it."""
    keys = list(names)
    last = name.rpartition(".")[2]
    key, equals, value = OTHER_NAMES.get(last, "").partition("=")
    found = (own for own in (key, FLAGS.get(key), FLAGS.get(name)) if own in keys)
    if own := next(found, None):
        return own + equals + value
    same = [own for own in keys if own.rpartition(".")[2] == last]
    return same[0] if len(same) == 1 else None


def with_flags(message: str, flags: Container[str]) -> str:
    """Returns an error about config keys with the flags of a command in place of the keys."""
    if "--text_key" in flags:
        message = re.sub(r", or see data\.format", "", message)
    for key, flag in FLAGS.items():
        if f"--{flag}" in flags and "." in key:
            message = re.sub(rf"(?<![\w./-]){re.escape(key)}(?!\w)", f"--{flag}", message)
    return message
