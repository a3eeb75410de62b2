"""Makes chats of which a model writes the answers, for training that should not change its answers.

    python scripts/model_chats.py --model DIR --train train.jsonl --held_out held_out.jsonl \\
        --out OUT [--prompts 1800] [--held_out_prompts 400]

Half of the prompts are about excerpts of the documents, half are about everyday topics. Answers are
sampled at temperature 1 by default: then the loss on held-out chats is least for the model itself,
and another model exceeds it by about the KL divergence of its answers, in nats per token.
Answers that do not end within --new_tokens are left out. Writes OUT/chats.jsonl and
OUT/held_out_chats.jsonl, with different prompts and documents, for `data.path` and for `bptjax
evaluate --data`.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
from document_pairs import DEFINE

import bptjax
from bptjax.data.templates import chat_prompt, opening
from bptjax.models.generation import generate
from bptjax.models.sampling import Sampling

# Lengths of excerpts, in characters.
LENGTHS = 200, 400, 800
ABOUT_EXCERPTS = (
    "Explain what this code does.",
    "Explain this to a beginner.",
    "Summarize this text in two sentences.",
    "Write a short comment for this code.",
    "Suggest a title for this text.",
    "Which names does this code define?",
    "What could go wrong in this code?",
    "Ask a question about this text and answer it.",
)
ABOUT_MACRO = "What does the macro {} do?"
TASKS = """Explain {} to a child.|Write three sentences about {}.|List five facts about {}.
Tell a short story about {}.|Give three tips for someone who is new to {}.|Write a poem about {}.
Write an email to a colleague about {}.|Name two advantages and one disadvantage of {}.
Name five words that have to do with {}.|Write a dialogue of four lines about {}.
What do people often get wrong about {}?|Write a quiz question about {} and its answer.
Make this sentence formal: I just can't get enough of {}!|Suggest a title for a book about {}.
Make this sentence shorter: It is the case that many people are interested in {}.
Invite a friend to an evening about {}.|Why do some people like {}?|Describe {} in one sentence.
Is this sentence positive or negative? I had hoped for more from {}.|What rhymes with {}?"""
TASKS = TASKS.replace("\n", "|").split("|")
TOPICS = """tea bicycles rain gardening chess trains bread bees mountains dreams libraries winter
dogs cats music painting football volcanoes markets maps clocks birthdays rivers letters bridges
cooking photography forests money sleep birds schools islands theater glass salt kites running
hospitals farms stars holidays lamps cheese history dancing camping robots shoes lakes paper wool"""
TOPICS = TOPICS.split()
SUMS = (
    "What is {} + {}?",
    "What is {} times {}?",
    "Anna has {} apples and buys {} more. How many apples does she have?",
    "Which number is larger, {} or {}?",
)


def texts_of(documents: Path) -> list[str]:
    """Returns the texts of a file of documents.

    Raises:
      ValueError: a record has none.
    """
    records = [json.loads(line) for line in documents.read_text().splitlines()]
    for number, record in enumerate(records, 1):
        if not isinstance(record.get("text"), str):
            raise ValueError(f"{documents}, record {number}: 'text' must be set")
    return [record["text"] for record in records]


def about_excerpts(documents: Path, count: int, rng: random.Random) -> Iterator[str]:
    """Yields prompts about excerpts of random documents."""
    texts = texts_of(documents)
    for _ in range(count):
        text, length = rng.choice(texts), rng.choice(LENGTHS)
        start = rng.randrange(max(len(text) - length, 1))
        part = text[start : start + length]
        excerpt = "\n".join(part.splitlines()[1:-1]) or part
        macros = [ABOUT_MACRO.format(name) for name, _ in DEFINE.findall(excerpt)]
        yield f"{rng.choice(macros or ABOUT_EXCERPTS)}\n\n{excerpt}"


def about_topics(count: int, rng: random.Random) -> list[str]:
    """Returns different prompts without documents, one in ten of them about numbers. The others are
    about a topic, or about two if there are more than that.

    Raises:
      ValueError: there are fewer.
    """
    most, topics = count - count // 10, list(TOPICS)
    if most > len(TASKS) * len(TOPICS):
        topics += [" and ".join(pair) for pair in combinations(TOPICS, 2)]
    prompts = [task.format(topic) for task, topic in product(TASKS, topics)]
    if most > len(prompts):
        raise ValueError(f"{most} prompts about topics: must be at most {len(prompts)}")
    numbers = [form.format(*pair) for form in SUMS for pair in product(range(11, 40), repeat=2)]
    found = rng.sample(prompts, most) + rng.sample(numbers, count // 10)
    return rng.sample(found, count)


def answers(
    model: Any, tokenizer: Any, prompts: list[str], *, batch: int, seed: int, **options: Any
) -> Iterator[str | None]:
    """Yields an answer to each prompt, None where the answer does not end. `options` go to
    `generate`."""
    ids = [chat_prompt(opening(prompt), tokenizer) for prompt in prompts]
    for first in range(0, len(ids), batch):
        # The last batch has the size of the others, and short chunks pad all to few lengths.
        some = [ids[i % len(ids)] for i in range(first, first + batch)]
        how: dict[str, Any] = options | dict(
            stop=tokenizer.stop_ids, seed=seed + first, prefill_chunk=128
        )
        tokens = np.stack(list(generate(model, some, **how)), axis=1)
        for row in tokens[: len(ids) - first]:
            ends = np.flatnonzero(np.isin(row, tokenizer.stop_ids))
            yield tokenizer.decode(row[: ends[0]].tolist()) if len(ends) else None


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", type=Path, required=True, help="documents to train on")
    parser.add_argument("--held_out", type=Path, required=True, help="documents held out")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=1800)
    parser.add_argument("--held_out_prompts", type=int, default=400)
    parser.add_argument("--new_tokens", type=int, default=256, help="of the longest answer")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=128, help="prompts answered at a time")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    rng = random.Random(args.seed)
    both = args.prompts, args.held_out_prompts
    topics = iter(about_topics(sum(n - n // 2 for n in both), rng))
    for documents in (args.train, args.held_out):
        try:
            texts_of(documents)
        except (OSError, ValueError) as error:
            parser.error(str(error))
    model, tokenizer, _ = bptjax.load(args.model, device=args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, documents, count in zip(
        ("chats", "held_out_chats"), (args.train, args.held_out), both, strict=True
    ):
        prompts = list(about_excerpts(documents, count // 2, rng))
        prompts += [next(topics) for _ in range(count - count // 2)]
        rng.shuffle(prompts)
        start, seed, ended = time.perf_counter(), rng.randrange(2**31), 0
        how: dict[str, Any] = dict(batch=args.batch, seed=seed, new_tokens=args.new_tokens)
        how |= dict(dtype=model.head_matrix.dtype, sampling=Sampling(args.temperature))
        with (args.out / f"{name}.jsonl").open("w") as file:
            for prompt, answer in zip(
                prompts, answers(model, tokenizer, prompts, **how), strict=True
            ):
                if answer and answer.strip():
                    ended += 1
                    messages = [*opening(prompt), dict(role="assistant", content=answer)]
                    file.write(json.dumps(dict(messages=messages)) + "\n")
        seconds = time.perf_counter() - start
        print(f"{ended} of {count} answers ended, {seconds:.1f} s: {args.out / name}.jsonl")
        if not ended:
            parser.error("no answer ended; raise --new_tokens or --prompts")


if __name__ == "__main__":
    main()
