"""Converts an architecture between GGUF metadata and a Hugging Face config."""

from collections.abc import Mapping
from typing import Any

from bptjax.models.config import ModelConfig
from bptjax.run.lazy_imports import transformers
from bptjax.weights.gguf.families import ROWS, SHARED, row_name
from bptjax.weights.gguf.keys import Keys
from bptjax.weights.gguf.rope import read_rope, write_rope
from bptjax.weights.gguf.row import Row
from bptjax.weights.hf.config import read_keys
from bptjax.weights.hf.config_export import same_rope
from bptjax.weights.hf.families import FAMILIES
from bptjax.weights.hf.from_scratch import computed, same_value

# Ends of keys whose values are floats, although a config may have integers.
FLOATS = ("epsilon", "freq_base", "scale", "softcapping", "factor")
# Attributes of a config that say whether its model has a bias, with the name of the bias.
BIASES = {
    "attention_bias": "attn_q.bias",
    "mlp_bias": "ffn_up.bias",
}


def text_config(raw: dict[str, Any]) -> Any:
    """Returns transformers' config of the text model in a config.json."""
    config = transformers().CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    return getattr(config, "text_config", config)


def write_metadata(raw: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Returns the metadata of an architecture, by whole key.

    Args:
      raw: the config.json of the model.

    Raises:
      ValueError: llama.cpp does not compute the model's rotary positions.
    """
    c = text_config(raw)
    row = ROWS[row_name(c.model_type)]
    keys = {g: getattr(c, hf, None) for g, hf in (SHARED | row.keys).items()}
    keys |= {"context_length": config.max_position_embeddings, "attention.head_count_kv": config.K}
    keys |= {"attention.key_length": config.H, "attention.value_length": config.H}
    keys |= {"vocab_size": config.V} | write_rope(config)
    keys |= row.write(c, config) if row.write else {}
    return {
        f"{row.arch}.{key}": float(value) if key.endswith(FLOATS) else value
        for key, value in keys.items()
        if value is not None
    }


def find_row(keys: Keys) -> tuple[str, Row]:
    """Returns the model_type and the row of a file.

    Raises:
      ValueError: the architecture is not supported.
    """
    rows = {kind: row for kind, row in ROWS.items() if row.arch == keys.arch}
    found = next(((kind, row) for kind, row in rows.items() if row.chosen(keys)), None)
    if found is None:
        known = ", ".join(dict.fromkeys(row.arch for row in ROWS.values()))
        raise ValueError(f"general.architecture={keys.arch!r}: must be one of {known}")
    return found


def read_metadata(keys: Keys, kind: str) -> dict[str, Any]:
    """Returns the config.json, as a family of this model_type, of the architecture in a file.

    Raises:
      ValueError: a key is missing or has a wrong value.
    """
    row = ROWS[kind]
    config_class = transformers().CONFIG_MAPPING[kind]
    default, embedding = config_class(), keys.shapes.get("token_embd.weight", (0, 0))
    heads = keys.integer("attention.head_count")
    size = keys.integer("embedding_length") // max(heads, 1)
    size = keys.integer("attention.key_length", size)
    if size < 1:
        raise ValueError(f"{keys.arch}.attention.key_length={size}: must be at least 1")
    values = {hf: keys.get(g) for g, hf in (SHARED | row.keys).items()}
    values |= {
        "head_dim": size,
        "vocab_size": embedding[0],
        "rope_parameters": _read_rope(keys, row, default, size),
        "tie_word_embeddings": "output.weight" not in keys.shapes,
    }
    values |= {attribute: keys.has(name) for attribute, name in BIASES.items()}
    if not isinstance(keys.get("attention.head_count_kv"), list):
        values["num_key_value_heads"] = keys.integer("attention.head_count_kv", heads)
    values |= row.fixed
    values |= row.read(keys) if row.read else {}
    known = {k: v for k, v in values.items() if hasattr(default, k)}
    if size * heads != keys.integer("embedding_length"):
        # Some classes have the attribute only if it is set.
        known["head_dim"] = size
    missing = [g for g, hf in (SHARED | row.keys).items() if hf in known and known[hf] is None]
    missing = [key for key in missing if (SHARED | row.keys)[key] not in row.fixed]
    if missing:
        raise ValueError(f"{keys.arch}.{missing[0]}: must be set")
    try:
        raw = config_class(**known).to_diff_dict() | {"model_type": kind}
    except Exception as error:
        # transformers' validators raise their own exception classes.
        text = " ".join(str(error).split())
        raise ValueError(f"metadata of {keys.arch}: {text}") from error
    return raw


def _read_rope(keys: Keys, row: Row, default: Any, size: int) -> dict[str, Any]:
    """Returns rotary parameters, in the form of transformers' config `default`."""
    usual = getattr(default, "rope_parameters", None) or {}
    found = read_rope(keys, size, "partial_rotary_factor" in usual)
    found |= row.rope(keys) if row.rope else {}
    kind = found["rope_type"]
    if kind not in ("default", "linear", "yarn", *row.ropes):
        raise ValueError(f"rope_type={kind}: must not be in a file of {keys.arch}")
    if "full_attention" not in usual:
        return found
    theta = keys.number("rope.freq_base_swa", usual["sliding_attention"]["rope_theta"])
    # llama.cpp has one theta for all layers of OLMo 3.
    theta = found["rope_theta"] if keys.arch == "olmo2" else theta
    local = {"rope_type": "default", "rope_theta": theta}
    return {"full_attention": found, "sliding_attention": local}


def read_architecture(raw: dict[str, Any]) -> ModelConfig:
    """Returns the architecture of a config.json of a text model.

    Raises:
      ValueError: a key is not supported.
    """
    kind = raw["model_type"]
    try:
        return read_keys(transformers().CONFIG_MAPPING[kind].from_dict(raw), raw, FAMILIES[kind])
    except Exception as error:
        # transformers' validators raise their own exception classes.
        raise ValueError(f"{kind}: {' '.join(str(error).split())}") from error


def differences(config: ModelConfig, read: ModelConfig) -> dict[str, Any]:
    """Returns the keys of `config`, with their values, that a file's architecture `read` lacks."""
    wanted, got = computed(config), computed(read)
    values: Mapping[str, Any] = wanted | {"rope_parameters": config.rope_parameters}
    names = [k for k, v in wanted.items() if not same_value(v, got.get(k))]
    # The window of each layer follows from sliding_window, which may be unused.
    names = [k for k in names if k not in ("rope_parameters", "sliding_window")]
    if config.experts.count and not config.dense_layers and config.expert_F == read.expert_F:
        names = [name for name in names if name != "intermediate_size"]
    rotary = config.position_embedding == "rope" == read.position_embedding
    if rotary and "window" not in names and not same_rope(config, read):
        names.append("rope_parameters")
    return {name: values[name] for name in names}
