"""Encoders of text and images, with layer norms."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from bptjax.models.config import ModelConfig
from bptjax.models.groups.attention import AttentionConfig
from bptjax.models.groups.encoder import EncoderConfig
from bptjax.models.groups.norms import NormsConfig
from bptjax.weights.hf.families.family import activation, require, rotary
from bptjax.weights.hf.tensor_rules import (
    TensorRule,
    attention,
    conv,
    fused,
    identity,
    linear,
    mlp,
    norm,
    qkv,
)

CLASSIFIER = "ForSequenceClassification"
IMAGE_CLASSIFIER = "ForImageClassification"
# Prefix of an encoder's class names, and suffix of its classifier's, by model_type.
NAMES = {
    "bert": ("Bert", CLASSIFIER),
    "roberta": ("Roberta", CLASSIFIER),
    "modernbert": ("ModernBert", CLASSIFIER),
    "vit": ("ViT", IMAGE_CLASSIFIER),
}
# Path prefixes of a classifier's own parameters.
CLASSIFIER_HEAD = "pooler.", "masked.", "classes."
# bptjax's names for ModernBERT's `classifier_pooling`.
POOLING: dict[str, Literal["first", "mean"]] = {"cls": "first", "mean": "mean"}
# Names in files of the head of a masked language model, which new classes replace.
MASKED_HEAD = r"cls\.predictions\..*|lm_head\..*|decoder\.(weight|bias)"


def layernorm_mlp_encoder(c: Any, **more: Any) -> dict[str, Any]:
    """Returns the keywords of ModelConfig that BERT and ViT share, updated with `more`."""
    return (
        dict(
            causal=False,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_layers=c.num_hidden_layers,
            num_heads=c.num_attention_heads,
            norms=NormsConfig("layer", c.layer_norm_eps, bias=True),
            position_embedding="learned",
            activation=activation(c.hidden_act),
            gated=False,
            attention=AttentionConfig(qkv_bias=True, out_bias=True),
            mlp_bias=True,
            embedding_dropout=c.hidden_dropout_prob,
            attention_dropout=c.attention_probs_dropout_prob,
            residual_dropout=c.hidden_dropout_prob,
        )
        | more
    )


def architecture(c: Any, known: tuple[str, ...]) -> str:
    """Returns the class that saved the checkpoint and so determines its heads; the first of `known`
    if the config names none."""
    names = c.architectures or known[:1]
    if names[0] not in known:
        raise ValueError(f"architectures={names}: must be one of {', '.join(known)}")
    return names[0]


def read_bert(c: Any, model: str = "Bert", offset: int = 0) -> dict[str, Any]:
    """Reads the bare model, with a pooler; …ForMaskedLM, with a head tied to the embedding; or
    …ForSequenceClassification, whose classes follow a pooler.

    Args:
      model: prefix of the class names.
      offset: entries of the learned positions before position 0.
    """
    kind = architecture(c, (f"{model}Model", f"{model}ForMaskedLM", f"{model}{CLASSIFIER}"))
    masked = kind.endswith("ForMaskedLM")
    require(c, tie_word_embeddings=True)
    if c.type_vocab_size < 1:
        raise ValueError(f"type_vocab_size={c.type_vocab_size}: must be at least 1")
    return layernorm_mlp_encoder(
        c,
        vocab_size=c.vocab_size,
        norms=NormsConfig(
            "layer", c.layer_norm_eps, "post", bias=True, embedding=True, final=False
        ),
        max_position_embeddings=c.max_position_embeddings - offset,
        position_offset=offset,
        encoder=EncoderConfig(
            token_types=c.type_vocab_size,
            pooler=0 if masked else c.hidden_size,
            masked_head=masked,
            classes=classes(c, kind),
        ),
        head_bias=masked,
    )


def classes(c: Any, kind: str) -> int:
    """Returns the number of classes that a class of transformers predicts; 0 for other classes than
    classifiers."""
    if not kind.endswith((CLASSIFIER, IMAGE_CLASSIFIER)):
        return 0
    if c.num_labels < 2 or c.problem_type not in (None, "single_label_classification"):
        raise ValueError(
            f"num_labels={c.num_labels}, problem_type={c.problem_type}: must have at least 2 "
            "classes, one of which is right"
        )
    return c.num_labels


def with_classes(raw: dict[str, Any], number: int) -> dict[str, Any]:
    """Converts an encoder's config.json `raw` to a classifier's with this number of classes.
    Returns `raw` itself if it has another head, such as a classifier's."""
    name, classifier = NAMES.get(raw.get("model_type", ""), (None, ""))
    saved = raw.get("architectures")
    bases = [f"{name}{head}" for head in ("Model", "ForMaskedLM", "ForPreTraining")]
    if not number or name is None or (saved and saved[0] not in bases):
        return raw
    named = class_names([f"LABEL_{i}" for i in range(number)])
    if len(raw.get("id2label") or ()) == number:
        named = {}
    others = {k: v for k, v in raw.items() if k not in ("num_labels", "problem_type")}
    return others | dict(architectures=[name + classifier]) | named


def class_names(names: Sequence[str]) -> dict[str, Any]:
    """Returns the keys of config.json that name the classes."""
    return dict(
        id2label={str(i): name for i, name in enumerate(names)},
        label2id={name: i for i, name in enumerate(names)},
    )


def read_roberta(c: Any) -> dict[str, Any]:
    """Reads RoBERTa, which is BERT but numbers positions from pad_token_id + 1. The head that
    predicts masked tokens always has GELU."""
    values = read_bert(c, "Roberta", c.pad_token_id + 1)
    if values["encoder"].masked_head:
        require(c, hidden_act="gelu")
    return values


def rules_encoder_layers(c: ModelConfig, layer: str) -> Iterator[TensorRule]:
    """Yields the rules that BERT and ViT share: the linear layers, named `attention.self` in BERT
    and `attention.attention` in ViT."""
    inner = "self" if c.norms.position == "post" else "attention"
    q, k, v = (f"{layer}attention.{inner}.{name}" for name in ("query", "key", "value"))
    yield from attention(c, q, k, v, f"{layer}attention.output.dense")
    yield from mlp(c, f"{layer}intermediate.dense", f"{layer}output.dense")


def rules_bert(
    c: ModelConfig,
    model: str = "bert.",
    head: tuple[str, str, str] = (
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.bias",
    ),
    classifier: tuple[str, str] = ("bert.pooler.dense", "classifier"),
) -> Iterator[TensorRule]:
    """Yields the rules of BertModel, BertForMaskedLM and BertForSequenceClassification, whose norms
    follow the sublayers.

    Args:
      head: names of the masked head: linear layer, norm, bias of the logits.
      classifier: names of a classifier's pooler and classes.
    """
    root, layer, D = f"{model}embeddings.", f"{model}encoder.layer.{{layer}}.", c.hidden_size
    positions = (c.max_position_embeddings or 0) + c.position_offset
    yield identity(f"{root}word_embeddings.weight", "embedding", (c.V, D))
    yield identity(f"{root}position_embeddings.weight", "positions", (positions, D))
    yield identity(f"{root}token_type_embeddings.weight", "types", (c.encoder.token_types, D))
    yield from norm(f"{root}LayerNorm", "embedding_norm", c)
    yield from rules_encoder_layers(c, layer)
    yield from norm(f"{layer}attention.output.LayerNorm", "layers.attention_norm", c)
    yield from norm(f"{layer}output.LayerNorm", "layers.mlp_norm", c)
    if c.encoder.pooler:
        pooler = classifier[0] if c.encoder.classes else f"{model}pooler.dense"
        yield from linear(pooler, "pooler", (D,), (D,), bias=True)
    if c.encoder.classes:
        yield from linear(classifier[1], "classes", (D,), (c.encoder.classes,), bias=True)
    if c.encoder.masked_head:
        dense, normed, bias = head
        yield from linear(dense, "masked.linear", (D,), (D,), bias=True)
        yield from norm(normed, "masked.norm", c)
        yield identity(bias, "head_bias", (c.V,))


def rules_roberta(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of RobertaModel, RobertaForMaskedLM and RobertaForSequenceClassification."""
    names = "lm_head.dense", "lm_head.layer_norm", "lm_head.bias"
    return rules_bert(c, "roberta.", names, ("classifier.dense", "classifier.out_proj"))


def read_modernbert(c: Any) -> dict[str, Any]:
    """Reads ModernBertForMaskedLM and ModernBertForSequenceClassification. In layers with a window,
    a token attends to half of local_attention on either side."""
    kind = architecture(c, ("ModernBertForMaskedLM", f"ModernBert{CLASSIFIER}"))
    number, pooling = classes(c, kind), c.classifier_pooling
    if number and pooling not in POOLING:
        raise ValueError(f"classifier_pooling={pooling!r}: must be one of {', '.join(POOLING)}")
    # bptjax would apply these dropouts to other activations.
    require(c, tie_word_embeddings=True, mlp_dropout=0.0, attention_dropout=0.0)
    require(c, classifier_activation=c.hidden_activation)
    return dict(
        causal=False,
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_layers=c.num_hidden_layers,
        num_heads=c.num_attention_heads,
        norms=NormsConfig("layer", c.norm_eps, bias=c.norm_bias, embedding=True, first=False),
        sliding_window=c.local_attention // 2 + 1,
        layer_types=list(c.layer_types),
        activation=activation(c.hidden_activation),
        attention=AttentionConfig(qkv_bias=c.attention_bias, out_bias=c.attention_bias),
        mlp_bias=c.mlp_bias,
        encoder=EncoderConfig(
            masked_head=True,
            masked_head_bias=c.classifier_bias,
            classes=number,
            class_pooling=POOLING[pooling] if number else "first",
        ),
        head_bias=c.decoder_bias and not number,
        embedding_dropout=c.embedding_dropout,
        **rotary(c),
    )


def rules_modernbert(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of both ModernBERT classes. The first layer has no norm before attention."""
    layer, D, F = "model.layers.{layer}.", c.hidden_size, c.F
    yield identity("model.embeddings.tok_embeddings.weight", "embedding", (c.V, D))
    yield from norm("model.embeddings.norm", "embedding_norm", c)
    yield from norm("model.layers.{normed_layer}.attn_norm", "layers.attention_norm", c)
    yield from qkv(c, f"{layer}attn.Wqkv")
    yield from attention(c, "", "", "", f"{layer}attn.Wo")
    yield from norm(f"{layer}mlp_norm", "layers.mlp_norm", c)
    names = "layers.mlp.gate", "layers.mlp.up"
    yield from fused(f"{layer}mlp.Wi", names, D, ((F,), (F,)), bias=c.mlp_bias)
    yield from mlp(c, "", f"{layer}mlp.Wo")
    yield from norm("model.final_norm", "norm", c)
    yield from linear("head.dense", "masked.linear", (D,), (D,), bias=c.encoder.masked_head_bias)
    yield from norm("head.norm", "masked.norm", c)
    if c.encoder.classes:
        yield from linear("classifier", "classes", (D,), (c.encoder.classes,), bias=True)
    if c.head_bias:
        yield identity("decoder.bias", "head_bias", (c.V,))


def read_vit(c: Any) -> dict[str, Any]:
    """Reads ViTModel and ViTForImageClassification. Sizes are one number or (height, width)."""
    kind = architecture(c, ("ViTModel", "ViTForImageClassification"))
    image, patch = (
        tuple(size) if isinstance(size, list | tuple) else (size, size)
        for size in (c.image_size, c.patch_size)
    )
    if min(*image, *patch) < 1 or image[0] % patch[0] or image[1] % patch[1]:
        raise ValueError(f"patch_size={patch}: must divide image_size={image}, both of at least 1")
    pooler, act = c.pooler_output_size, c.pooler_act
    if act not in ("tanh", "gelu", "relu", "silu"):
        raise ValueError(f"pooler_act={act!r}: must be one of tanh, gelu, relu, silu")
    return layernorm_mlp_encoder(
        c,
        max_position_embeddings=image[0] // patch[0] * (image[1] // patch[1]) + 1,
        encoder=EncoderConfig(
            image_size=image,
            patch_size=patch,
            channels=c.num_channels,
            pooler=pooler if kind == "ViTModel" else 0,
            pooler_activation=act,
            classes=classes(c, kind),
        ),
        attention=AttentionConfig(qkv_bias=c.qkv_bias, out_bias=True),
    )


def rules_vit(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of ViTModel and ViTForImageClassification. A convolution embeds the patches,
    the first token is a parameter, and both have learned positions."""
    root, layer, D = "vit.embeddings.", "vit.encoder.layer.{layer}.", c.hidden_size
    yield identity(f"{root}cls_token", "first", (1, D), (1, 1, D))
    tokens = c.encoder.patches + 1
    yield identity(f"{root}position_embeddings", "positions", (tokens, D), (1, tokens, D))
    patch = (c.encoder.channels, *(c.encoder.patch_size or ()))
    yield from conv(f"{root}patch_embeddings.projection", "patches", patch, D)
    yield from rules_encoder_layers(c, layer)
    yield from norm(f"{layer}layernorm_before", "layers.attention_norm", c)
    yield from norm(f"{layer}layernorm_after", "layers.mlp_norm", c)
    yield from norm("vit.layernorm", "norm", c)
    if c.encoder.pooler:
        yield from linear("vit.pooler.dense", "pooler", (D,), (c.encoder.pooler,), bias=True)
    if c.encoder.classes:
        yield from linear("classifier", "classes", (D,), (c.encoder.classes,), bias=True)
