"""Compares a model with transformers' model of the same weights."""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bptjax.run.json_files import read_json
from bptjax.run.progress import Progress
from bptjax.weights.conversion import merging, written_dtypes
from bptjax.weights.hf.families.family import CAUSAL
from bptjax.weights.pretrained import Pretrained


def difference(
    hf: Path, model: Pretrained, params: Iterator[tuple[str, np.ndarray]] | None = None
) -> tuple[list[float], float]:
    """Returns the largest difference from `transformers`, relative to the largest value, in
    float32: for each hidden state, embeddings first, and for the logits, or for the pooled output
    of a model without a head.

    Args:
      params: (path, array) of every parameter, instead of the model's parameters.
    """
    import torch
    import transformers

    kind = getattr(transformers, model.family.auto_class if model.family else CAUSAL)
    config, key, rng = model.config, "input_ids", np.random.default_rng(0)
    if not config.causal:
        name = (read_json(hf / "config.json").get("architectures") or [None])[0]
        kind = getattr(transformers, str(name), None)
        if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
            raise ValueError(
                f"{hf / 'config.json'}: architectures: must name a model, not {name!r}"
            )
    if config.encoder.image_size:
        shape = 2, config.encoder.channels, *config.encoder.image_size
        inputs, key = rng.normal(size=shape).astype(np.float32), "pixel_values"
    else:
        inputs = rng.integers(0, config.V, (2, min(37, config.max_position_embeddings or 37)))
        # Some transformers models count no position for padding tokens.
        padding = read_json(hf / "config.json").get("pad_token_id")
        inputs = np.where(inputs == padding, (inputs + 1) % config.V, inputs)
    theirs = kind.from_pretrained(
        str(hf), dtype=torch.float32, local_files_only=True, trust_remote_code=False
    ).eval()
    with torch.no_grad():
        out = theirs(**{key: torch.tensor(inputs)}, output_hidden_states=True)
    end = out.logits if "logits" in out else out.pooler_output
    states, end = [x.numpy() for x in out.hidden_states], end.numpy()
    del theirs, out
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    ours = model.load(where, params=params)
    *layers, stream, last = jax.jit(type(ours).hidden_states)(ours, jnp.asarray(inputs))
    # transformers' last hidden state follows the final norm for text, but precedes it for images.
    final = stream if config.encoder.image_size else last
    headless = config.encoder.pooler and not config.encoder.classes
    got = jax.jit(type(ours).pooled if headless else type(ours).logits)(ours, last)
    errors = [_relative(a, b) for a, b in zip([*layers, final], states, strict=True)]
    return errors, _relative(got, end)


def _relative(got: jax.Array, wanted: np.ndarray) -> float:
    return float(np.abs(np.asarray(got) - wanted).max() / np.abs(wanted).max())


def verify(hf: Path, model: Pretrained, dtype: str | None) -> tuple[bool, str]:
    """Compares the model with transformers' model of `hf`. Returns whether they compute the same,
    and a line about it.

    Args:
      dtype: dtype that was written. Parameters are rounded to it first, to check the conversion and
        not the rounding.
    """
    dtypes = written_dtypes(model, dtype)
    params = None if set(dtypes.values()) == {"float32"} else _rounded(model, dtypes)
    layers, logits = difference(hf, model, params)
    worst = max(*layers, logits)
    text = f"largest relative difference: logits {logits:.1e}, hidden states {max(layers):.1e}"
    if worst <= 1e-4:
        return True, text
    return False, f"{text}, after layer {int(np.argmax(layers))}"


def _rounded(model: Pretrained, dtypes: dict[str, str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (path, array) of every parameter in the written dtype, with adapters merged."""
    specs = model.source.specs
    read = model.source.read if model.adapters is None else merging(model)
    with Progress("verifying", sum(spec.nbytes for spec in specs.values())) as progress:
        for path, dtype in dtypes.items():
            layered = path.startswith("layers.")
            layers = range(specs[path].shape[0]) if layered else ()
            array = np.stack([read(path, (i,)) for i in layers]) if layered else read(path, ())
            yield path, array.astype(dtype)
            progress.advance(specs[path].nbytes)
