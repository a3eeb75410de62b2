"""Remembers the order of records, which resumed loaders draw again; tokenizers of each kind."""

import functools

import pytest
from chats import loaded, raw_tokenizer
from grain._src.python.experimental.index_shuffle.python import index_shuffle_module

# A pure function, which takes 30 ms divided by the number of records.
index_shuffle_module.index_shuffle = functools.cache(index_shuffle_module.index_shuffle)


@pytest.fixture(scope="module")
def tokenizers():
    """A function from kind and template to (transformers' tokenizer, ours)."""
    pytest.importorskip("tokenizers")
    cache = {}

    def make(kind, template=None, bos=True):
        if (kind, bos) not in cache:
            cache[kind, bos] = raw_tokenizer(kind, bos=bos)
        raw = cache[kind, bos]
        raw.chat_template = template
        return raw, loaded(raw)

    return make
