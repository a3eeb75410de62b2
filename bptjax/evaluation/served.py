"""A model as lm-evaluation-harness (`lm_eval`) calls it."""

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from bptjax.data.hf_tokenizer import HFTokenizer
from bptjax.data.templates import render
from bptjax.data.tokenizer import Tokenizer
from bptjax.evaluation.likelihoods import batches, log_likelihoods, padded_length, power_of_two
from bptjax.models.decoder import Decoder
from bptjax.models.generation import continuations
from bptjax.models.sampling import choose_sampling
from bptjax.run.output import plural
from bptjax.run.progress import Progress

log = logging.getLogger("bptjax")
# lm_eval's default number of tokens of an answer.
ANSWER_TOKENS = 256
# Largest number of prompt tokens that the model reads at a time.
CHUNK = 2048


class Served:
    """A model as lm_eval calls it: a `TemplateLM`, without that base class. Follows lm_eval's
    backend for transformers in all that changes a score.

    Args:
      max_length: largest number of tokens of a text. Longer contexts lose their beginning.
      name: name of the tokenizer, the key of lm_eval's cache of prompts.
      seed: seed of sampled answers.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        name: str = "",
        seed: int = 0,
    ):
        super().__init__()
        self.model, self.text, self.max_length = model, tokenizer, max_length
        self._name, self._seed = name, seed
        self._dtype = jnp.dtype(model.head_matrix.dtype)

    @property
    def tokenizer_name(self) -> str:
        return self._name

    @property
    def eot_token_id(self) -> int | None:
        return self.text.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token that precedes a text without context: BOS, or else EOS.

        Raises:
          ValueError: the tokenizer has neither.
        """
        bos = self.text.special_tokens.get("bos_token")
        ids = [] if bos is None else self.text.encode_rendered(str(bos)).tolist()
        if len(ids) == 1:
            return ids[0]
        if self.text.eos_id is None:
            raise ValueError("--lm_eval: the tokenizer must have a BOS or EOS token")
        return self.text.eos_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Returns token ids. By default, with the tokenizer's prefix unless the text starts with
        BOS, as the texts of chat templates do."""
        if add_special_tokens is None:
            starts = self.text.start_text.rstrip(), self.text.decode([self.prefix_token_id])
            add_special_tokens = not any(start and string.startswith(start) for start in starts)
        encode = self.text.encode_prompt if add_special_tokens else self.text.encode_rendered
        return encode(string).tolist()

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns the messages in the chat template, without reasoning. Without
        `add_generation_prompt`, the text ends with the last message, which the model continues.

        Raises:
          ValueError: the template refuses the messages, or changes the last one.
        """
        how: Any = dict(variables={"enable_thinking": False}, answer=add_generation_prompt)
        text, _ = render(chat_history, self.text.chat_template or "", self.text, **how)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"]
        # Some templates strip messages.
        for written in (last, last.strip()):
            if (at := text.rfind(written)) >= 0:
                return text[: at + len(written)]
        raise ValueError("--lm_eval: the chat template must write the last message; use --no_chat")

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs, longer = [], 0
        for _, context, continuation in requests:
            excess = max(len(context) + len(continuation) - 1 - self.max_length, 0)
            if excess >= len(context):
                raise ValueError(
                    f"--lm_eval: an answer of {len(continuation)} tokens: must be at most "
                    f"{self.max_length} tokens, the length of a text; raise --seq_len"
                )
            longer += excess > 0
            pairs.append((context[excess:], continuation))
        self._tell(longer)
        with Progress("log-likelihoods", len(pairs)) as progress:
            return log_likelihoods(self.model, pairs, dtype=self._dtype, advance=progress.advance)

    def _tell(self, longer: int) -> None:
        if longer:
            text = f"warning: {plural(longer, 'prompt')} of more than {self.max_length:,} tokens: "
            log.warning(f"{text}shortened at the start; see --seq_len")

    def loglikelihood_rolling(self, requests: list[Any], **_: Any) -> list[float]:
        """Returns the log-likelihood of each whole text, in windows of `max_length` tokens."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows, owners = [], []
        for i, request in enumerate(requests):
            # As in lm_eval, a prefix of the tokenizer is predicted too, after another one.
            ids = self.tok_encode(request.args[0])
            how = dict(prefix_token=self.prefix_token_id, max_seq_len=self.max_length)
            for window in get_rolling_token_windows(ids, **how, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(i)
        totals = [0.0] * len(requests)
        for i, found in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[i] += found[0]
        return totals

    def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
        """Returns the answers, each up to a stop string. Requests of the same settings share
        batches."""
        same: dict[str, list[int]] = defaultdict(list)
        for i, request in enumerate(requests):
            same[repr(request.args[1])].append(i)
        answers = [""] * len(requests)
        with Progress("answers", len(requests)) as progress:
            for owners in same.values():
                prompts = [requests[i].args[0] for i in owners]
                for some in self._answers(prompts, requests[owners[0]].args[1]):
                    for at, answer in some:
                        answers[owners[at]] = answer
                    progress.advance(len(some))
        return answers

    def _answers(
        self, prompts: list[str], settings: dict[str, Any]
    ) -> Iterator[list[tuple[int, str]]]:
        """Yields the indices and answers of a batch of prompts.

        Raises:
          ValueError: a setting that is out of range, or more tokens than a text may have.
        """
        from lm_eval.models.utils import (
            handle_stop_sequences,
            normalize_gen_kwargs,
            postprocess_generated_text,
        )

        chosen: dict[str, Any] = dict(normalize_gen_kwargs(settings, ANSWER_TOKENS))
        eos = None if self.text.eos_id is None else self.text.decode([self.text.eos_id])
        stops = [text for text in handle_stop_sequences(chosen.pop("until"), eos) if text]
        new_tokens = chosen.pop("max_gen_toks")
        if (room := self.max_length - new_tokens) < 1:
            raise ValueError(
                f"--lm_eval: answers of {new_tokens} tokens: must be shorter than "
                f"{self.max_length} tokens, the length of a text; raise --seq_len"
            )
        sampling, _ = choose_sampling(self.text.generation_config | chosen, log.warning, chat=False)
        encoded = [np.array(self.tok_encode(prompt), np.int32) for prompt in prompts]
        self._tell(sum(len(ids) > room for ids in encoded))
        encoded = [ids[-room:] for ids in encoded]
        special = []
        if isinstance(self.text, HFTokenizer):
            special = self.text.transformers.all_special_tokens
        for batch in batches([len(ids) for ids in encoded], new_tokens):
            # Prompts of one padded length, in few sizes of batches, share programs.
            short = power_of_two(len(batch)) - len(batch)
            longest = padded_length(max(len(encoded[i]) for i in batch))
            *_, texts = continuations(
                self.model,
                self.text,
                [encoded[i] for i in batch + batch[-1:] * short],
                stop_strings=stops,
                new_tokens=new_tokens,
                sampling=sampling,
                seed=self._seed + batch[0],
                prefill_chunk=min(CHUNK, power_of_two(longest) // 8),
                dtype=self._dtype,
            )
            found = []
            for i, text in zip(batch, texts, strict=False):
                for token in special:
                    text = text.replace(token, "")
                found.append((i, postprocess_generated_text(text, stops, None)))
            yield found


def serve(model: Decoder, tokenizer: Tokenizer, **how: Any) -> Any:
    """Returns the model as an instance of lm_eval's `TemplateLM`; `how` is that of `Served`."""
    from lm_eval.api.model import TemplateLM

    return type("Bptjax", (Served, TemplateLM), {})(model, tokenizer, **how)
