"""Computes with a GGUF file by llama.cpp, in the Python of another environment.

    V/bin/python scripts/llamacpp_reader.py <<< '{"model": "FILE", "prompts": [[1, 2]], "new": 4}'

V is an environment with numpy and xllamacpp, a wheel that ships llama.cpp. Prints a JSON object:
the greedy tokens after each prompt, and the log-likelihood of each token of the text but the first.
"""

import ctypes
import importlib.util
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np

# Defaults of a context: the kernel of attention is chosen, and keys and values are float16. Another
# kernel and type compute in float32.
USUAL, FULL_PRECISION = (-1, 1, 1), (0, 0, 0)
# Larger than llama.cpp's structs of parameters, which are passed by value in memory: llama.cpp
# fills and reads the first bytes.
PARAMETER_BYTES = 1024


class Parameters(ctypes.Structure):
    """Parameters of a model or a context. The named fields are those of a context."""

    _fields_ = [
        ("n_ctx", ctypes.c_uint32),
        ("n_batch", ctypes.c_uint32),
        ("n_ubatch", ctypes.c_uint32),
        ("before", ctypes.c_char * 40),
        ("flash_attention", ctypes.c_int32),
        ("between", ctypes.c_char * 48),
        ("type_k", ctypes.c_int32),
        ("type_v", ctypes.c_int32),
        ("others", ctypes.c_char * (PARAMETER_BYTES - 112)),
    ]


class Batch(ctypes.Structure):
    """llama.cpp's `llama_batch`."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


def open_library() -> ctypes.CDLL:
    """Opens xllamacpp's llama.cpp and declares the functions that return no int."""
    found = importlib.util.find_spec("xllamacpp")
    assert found is not None and found.origin is not None
    (file,) = Path(found.origin).parent.glob("xllamacpp*.so")
    library, pointer = ctypes.CDLL(str(file)), ctypes.c_void_p
    for name, result, arguments in (
        ("llama_model_default_params", Parameters, []),
        ("llama_context_default_params", Parameters, []),
        ("llama_model_load_from_file", pointer, [ctypes.c_char_p, Parameters]),
        ("llama_init_from_model", pointer, [pointer, Parameters]),
        ("llama_model_get_vocab", pointer, [pointer]),
        ("llama_vocab_n_tokens", ctypes.c_int32, [pointer]),
        ("llama_adapter_lora_init", pointer, [pointer, ctypes.c_char_p]),
        ("llama_set_adapters_lora", ctypes.c_int32, [pointer, pointer, ctypes.c_size_t, pointer]),
        ("llama_get_memory", pointer, [pointer]),
        ("llama_memory_clear", None, [pointer, ctypes.c_bool]),
        ("llama_batch_init", Batch, [ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]),
        ("llama_decode", ctypes.c_int32, [pointer, Batch]),
        ("llama_get_logits", ctypes.POINTER(ctypes.c_float), [pointer]),
        ("llama_tokenize", ctypes.c_int32, [pointer, ctypes.c_char_p, ctypes.c_int32, pointer]
         + [ctypes.c_int32, ctypes.c_bool, ctypes.c_bool]),
    ):  # fmt: skip
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.llama_backend_init()
    return library


class Model:
    """A GGUF file, with or without an adapter."""

    def __init__(self, file: str, lora: str | None, context: int, precise: bool):
        self.library = open_library()
        self.model = self.library.llama_model_load_from_file(
            file.encode(), self.library.llama_model_default_params()
        )
        if not self.model:
            raise ValueError(f"{file}: llama.cpp cannot load it")
        parameters = self.library.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = context
        names = "flash_attention", "type_k", "type_v"
        if tuple(getattr(parameters, name) for name in names) != USUAL:
            raise ValueError("xllamacpp: has other parameters of a context than this script")
        for name, value in zip(names, FULL_PRECISION if precise else USUAL, strict=True):
            setattr(parameters, name, value)
        self.context = self.library.llama_init_from_model(self.model, parameters)
        if not self.context:
            raise ValueError(f"{file}: llama.cpp cannot make a context")
        self.vocab = self.library.llama_model_get_vocab(self.model)
        self.V = self.library.llama_vocab_n_tokens(self.vocab)
        self.batch = self.library.llama_batch_init(context, 0, 1)
        if lora:
            adapter = self.library.llama_adapter_lora_init(self.model, lora.encode())
            if not adapter:
                raise ValueError(f"{lora}: llama.cpp cannot load it")
            one, scale = (ctypes.c_void_p * 1)(adapter), (ctypes.c_float * 1)(1.0)
            if self.library.llama_set_adapters_lora(self.context, one, 1, scale):
                raise ValueError(f"{lora}: llama.cpp cannot use it")

    def logits(self, tokens: list[int], start: int = 0) -> np.ndarray:
        """Returns the float64 logits `[T, V]` of tokens at the positions from `start`."""
        if not start:
            self.library.llama_memory_clear(self.library.llama_get_memory(self.context), True)
        self.batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            self.batch.token[i], self.batch.pos[i], self.batch.logits[i] = token, start + i, 1
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, 0
        if code := self.library.llama_decode(self.context, self.batch):
            raise ValueError(f"llama_decode returned {code}")
        read = self.library.llama_get_logits(self.context)
        return np.ctypeslib.as_array(read, (len(tokens), self.V)).astype(np.float64)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Returns the most likely tokens after a prompt."""
        tokens, new = [], prompt
        for i in range(count):
            start = len(prompt) + i - len(new) if i else 0
            new = [int(self.logits(new, start)[-1].argmax())]
            tokens += new
        return tokens

    def log_likelihoods(self, text: list[int]) -> list[float]:
        """Returns the log-likelihood of each token but the first."""
        logits = self.logits(text)[:-1]
        logits -= logits.max(-1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
        return logits[np.arange(len(logits)), text[1:]].tolist()

    def tokenize(self, text: str) -> list[int]:
        """Returns the ids of a text, with BOS if the file says so."""
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 8))()
        count = self.library.llama_tokenize(self.vocab, data, len(data), ids, len(ids), True, True)
        return list(ids[:count])


def main() -> None:
    asked = json.load(sys.stdin)
    texts = asked.get("texts", [])
    longest = max(map(len, [*asked["prompts"], *texts]), default=1) + asked.get("new", 0)
    # llama.cpp writes its log to stderr; keep stdout for the answer.
    context = asked.get("context") or max(longest, 64)
    precise = asked.get("precision") == "f32"
    model = Model(asked["model"], asked.get("lora"), context, precise)
    answer = dict(
        greedy=[model.greedy(prompt, asked["new"]) for prompt in asked["prompts"]],
        log_likelihoods=[model.log_likelihoods(text) for text in texts],
        tokens=[model.tokenize(text) for text in asked.get("tokenize", [])],
        xllamacpp=version("xllamacpp"),
    )
    print(json.dumps(answer), flush=True)
    # Skip llama.cpp's destructors, which may run after its backend's.
    os._exit(0)


if __name__ == "__main__":
    main()
