"""Kinds of layers that mix tokens otherwise than attention does."""

from bptjax.models.linear_attention import LinearAttention
from bptjax.models.mixer import Mixer
from bptjax.models.short_convolution import ShortConvolution

# The module of each kind in `layer_types`; its choices are the group of `ModelConfig` of this name.
MIXERS: dict[str, type[Mixer]] = {
    "linear_attention": LinearAttention,
    "short_convolution": ShortConvolution,
}
