"""Attention-free kinds of layers, by name."""

from bptjax.models.linear_attention import LinearAttention
from bptjax.models.mixer import Mixer
from bptjax.models.short_convolution import ShortConvolution

# Module of each kind in `layer_types`; `ModelConfig` has a group of the same name.
MIXERS: dict[str, type[Mixer]] = {
    "linear_attention": LinearAttention,
    "short_convolution": ShortConvolution,
}
