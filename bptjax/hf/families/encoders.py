"""Encoders of text and images, with layer norms and learned positions."""

from collections.abc import Iterator
from typing import Any

from bptjax.hf.families.family import activation, require
from bptjax.hf.tensor_rules import TensorRule, attention, conv, identity, linear, mlp, norm
from bptjax.models.config import ModelConfig


def layernorm_mlp_encoder(c: Any, **more: Any) -> dict[str, Any]:
    """Returns the keywords that these families share, updated with `more`."""
    return (
        dict(
            causal=False,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_layers=c.num_hidden_layers,
            num_heads=c.num_attention_heads,
            norm="layer",
            norm_eps=c.layer_norm_eps,
            norm_bias=True,
            position_embedding="learned",
            activation=activation(c.hidden_act),
            gated=False,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            embedding_dropout=c.hidden_dropout_prob,
            attention_dropout=c.attention_probs_dropout_prob,
            residual_dropout=c.hidden_dropout_prob,
        )
        | more
    )


def architecture(c: Any, known: tuple[str, ...]) -> str:
    """Returns the class that saved the checkpoint, which determines its heads; the first of `known`
    if the config names none."""
    names = c.architectures or known[:1]
    if names[0] not in known:
        raise ValueError(f"architectures={names}: must be one of {', '.join(known)}")
    return names[0]


def read_bert(c: Any) -> dict[str, Any]:
    """Reads BertModel, with a pooler, and BertForMaskedLM, with a head tied to the embedding."""
    kind = architecture(c, ("BertModel", "BertForMaskedLM"))
    require(c, tie_word_embeddings=True)
    return layernorm_mlp_encoder(
        c,
        vocab_size=c.vocab_size,
        norm_position="post",
        max_position_embeddings=c.max_position_embeddings,
        token_types=c.type_vocab_size,
        embedding_norm=True,
        final_norm=False,
        pooler=c.hidden_size if kind == "BertModel" else 0,
        masked_head=kind == "BertForMaskedLM",
        head_bias=kind == "BertForMaskedLM",
    )


def rules_encoder_layers(c: ModelConfig, layer: str) -> Iterator[TensorRule]:
    """Yields the rules that BERT and ViT share: the linear layers, `attention.self` in BERT and
    `attention.attention` in ViT."""
    inner = "self" if c.norm_position == "post" else "attention"
    q, k, v = (f"{layer}attention.{inner}.{name}" for name in ("query", "key", "value"))
    yield from attention(c, q, k, v, f"{layer}attention.output.dense")
    yield from mlp(c, f"{layer}intermediate.dense", f"{layer}output.dense")


def rules_bert(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of BertModel and BertForMaskedLM, whose norms follow the sublayers."""
    root, layer, D = "bert.embeddings.", "bert.encoder.layer.{layer}.", c.hidden_size
    positions = c.max_position_embeddings or 0
    yield identity(f"{root}word_embeddings.weight", "embedding", (c.V, D))
    yield identity(f"{root}position_embeddings.weight", "positions", (positions, D))
    yield identity(f"{root}token_type_embeddings.weight", "types", (c.token_types, D))
    yield from norm(f"{root}LayerNorm", "embedding_norm", c)
    yield from rules_encoder_layers(c, layer)
    yield from norm(f"{layer}attention.output.LayerNorm", "layers.attention_norm", c)
    yield from norm(f"{layer}output.LayerNorm", "layers.mlp_norm", c)
    if c.pooler:
        yield from linear("bert.pooler.dense", "pooler", (D,), (D,), bias=True)
    if c.masked_head:
        root = "cls.predictions."
        yield from linear(f"{root}transform.dense", "masked.linear", (D,), (D,), bias=True)
        yield from norm(f"{root}transform.LayerNorm", "masked.norm", c)
        yield identity(f"{root}bias", "head_bias", (c.V,))


def read_vit(c: Any) -> dict[str, Any]:
    """Reads ViTModel and ViTForImageClassification. Sizes are one number or (height, width)."""
    kind = architecture(c, ("ViTModel", "ViTForImageClassification"))
    image, patch = (
        tuple(size) if isinstance(size, list | tuple) else (size, size)
        for size in (c.image_size, c.patch_size)
    )
    if image[0] % patch[0] or image[1] % patch[1]:
        raise ValueError(f"patch_size={patch}: must divide image_size={image}")
    pooler, labels, act = c.pooler_output_size, c.num_labels, c.pooler_act
    if act not in ("tanh", "gelu", "relu", "silu"):
        raise ValueError(f"pooler_act={act!r} is not supported; must be tanh, gelu, relu or silu")
    return layernorm_mlp_encoder(
        c,
        max_position_embeddings=image[0] // patch[0] * (image[1] // patch[1]) + 1,
        image_size=image,
        patch_size=patch,
        channels=c.num_channels,
        qkv_bias=c.qkv_bias,
        pooler=pooler if kind == "ViTModel" else 0,
        pooler_activation=act,
        classes=labels if kind == "ViTForImageClassification" else 0,
    )


def rules_vit(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of ViTModel and ViTForImageClassification. Patches are embedded by a
    convolution, the first token is a parameter, and both have learned positions."""
    root, layer, D = "vit.embeddings.", "vit.encoder.layer.{layer}.", c.hidden_size
    yield identity(f"{root}cls_token", "first", (1, D), (1, 1, D))
    tokens = c.patches + 1
    yield identity(f"{root}position_embeddings", "positions", (tokens, D), (1, tokens, D))
    patch = (c.channels, *(c.patch_size or ()))
    yield from conv(f"{root}patch_embeddings.projection", "patches", patch, D)
    yield from rules_encoder_layers(c, layer)
    yield from norm(f"{layer}layernorm_before", "layers.attention_norm", c)
    yield from norm(f"{layer}layernorm_after", "layers.mlp_norm", c)
    yield from norm("vit.layernorm", "norm", c)
    if c.pooler:
        yield from linear("vit.pooler.dense", "pooler", (D,), (c.pooler,), bias=True)
    if c.classes:
        yield from linear("classifier", "classes", (D,), (c.classes,), bias=True)
