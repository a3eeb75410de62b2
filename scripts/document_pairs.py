"""Makes pairs of answers to questions about long documents, and questions about other documents.

    python scripts/document_pairs.py --model DIR --train train.jsonl --held_out held_out.jsonl \\
        --out OUT [--pairs 2000] [--questions 300] [--lengths 8192 12288 16384]

`scripts/linux_documents.py` makes the documents. A question asks for the value of a macro, whose
`#define` stands once in an excerpt of a document; the worse answer is the value of another macro of
this excerpt. Prompts are those of the task `questions` of `bptjax evaluate`: the excerpt among
others, in the chat template of the model. Writes to OUT:

- pairs.jsonl and held_out_pairs.jsonl: for `data.path` and `data.eval_path`
- train_questions.jsonl and questions.jsonl: the same questions, for `bptjax evaluate --questions`
"""

import argparse
import json
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from itertools import chain, zip_longest
from pathlib import Path
from typing import NamedTuple

from bptjax.data.preferences import CHOSEN, PROMPT, REJECTED
from bptjax.data.tokenizer import Tokenizer
from bptjax.run.output import describe
from bptjax.tasks import QUESTIONS, TASKS
from bptjax.tasks.questions import ANSWER, DOCUMENT, QUESTION, Questions
from bptjax.tasks.sample import Sample, Sampler, encoder
from bptjax.tasks.scores import made_ahead
from bptjax.weights.loading import open_decoder

DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)(.*)", re.MULTILINE)
# A number of at least three characters, and a comment.
NUMBER = re.compile(r"[ \t]+(0x[0-9a-fA-F]{2,8}|[1-9][0-9]{2,7})[ \t]*(?:/[/*].*)?")
ASKED = "What is the value of the macro {}?"
# Smallest number of macros of an excerpt that a question may ask for.
LEAST = 4
# Largest share of the shortest prompt that an excerpt takes.
SHARE = 0.75


class Asked(NamedTuple):
    """A question about a macro of an excerpt."""

    excerpt: str
    name: str
    right: str
    wrong: str


def excerpts(text: str, characters: int) -> Iterator[str]:
    """Splits a text at line ends into excerpts of up to `characters`."""
    start = 0
    while start < len(text):
        end = text.rfind("\n", start, start + characters) + 1 or start + characters
        yield text[start:end]
        start = end


def answerable(excerpt: str, unique: Collection[str]) -> Iterator[Asked]:
    """Yields a question for each of the `unique` macros whose value is a number that is neither in
    its name nor elsewhere in the excerpt."""
    numbers = {
        name: found[1]
        for name, rest in DEFINE.findall(excerpt)
        if name in unique and (found := NUMBER.fullmatch(rest))
    }
    text = excerpt.lower()
    for name, right in numbers.items():
        others = [value for value in numbers.values() if value.lower() not in right.lower()]
        guessed = right.lower().removeprefix("0x") in name.lower()
        if len(numbers) >= LEAST and others and not guessed and text.count(right.lower()) == 1:
            wrong = random.Random(f"{name} {excerpt}").choice(others)
            yield Asked(excerpt, name, right, wrong)


def ask(
    documents: Path, characters: int, seed: int, known: Collection[str] = ()
) -> tuple[list[Asked], Collection[str]]:
    """Returns questions about macros that are defined once in all documents, and the names of all
    macros. The first questions, of any number, are balanced over directories, and over the excerpts
    of each.

    Args:
      known: macros that no question asks for.
    """
    directories: dict[str, list[str]] = defaultdict(list)
    with documents.open() as file:
        for document in map(json.loads, file):
            directories[document["directory"]] += excerpts(document["text"], characters)
    texts = chain.from_iterable(directories.values())
    defined = Counter(name for text in texts for name, _ in DEFINE.findall(text))
    unique = {name for name, times in defined.items() if times == 1 and name not in known}
    rng = random.Random(seed)

    def in_turn(lists: list[list[Asked]]) -> list[Asked]:
        rng.shuffle(lists)
        return [each for turn in zip_longest(*lists) for each in turn if each is not None]

    found = []
    for of_directory in directories.values():
        lists = [list(answerable(excerpt, unique)) for excerpt in of_directory]
        for each in lists:
            rng.shuffle(each)
        found.append(in_turn(lists))
    return in_turn(found), defined


def write_questions(
    file: Path, asked: list[Asked], count: int, tokenizer: Tokenizer, tokens: int
) -> dict[str, str]:
    """Writes the first `count` questions whose excerpt has up to `tokens`. Returns the wrong answer
    to each.

    Raises:
      ValueError: there are fewer questions.
    """
    fits: dict[str, bool] = {}
    wrong: dict[str, str] = {}
    with file.open("w") as lines:
        for each in asked:
            if len(wrong) == count:
                break
            if each.excerpt not in fits:
                fits[each.excerpt] = len(tokenizer.encode(each.excerpt)) <= tokens
            if fits[each.excerpt]:
                question = ASKED.format(each.name)
                wrong[question] = each.wrong
                record = {DOCUMENT: each.excerpt, QUESTION: question, ANSWER: each.right}
                lines.write(json.dumps(record) + "\n")
    if len(wrong) < count:
        raise ValueError(f"{file}: the documents give {len(wrong)} of {count} questions")
    return wrong


def write_pairs(
    file: Path, source: Questions, wrong: dict[str, str], samplers: list[Sampler]
) -> None:
    """Writes a pair for each question, in prompts of each length in turn."""

    def make(index: int) -> Sample:
        return samplers[index % len(samplers)][index]

    with file.open("w") as lines:
        for sample in made_ahead(make, len(source.questions)):
            (right,) = sample.drawn.references
            pair = {
                PROMPT: [{"role": "user", "content": sample.prompt}],
                CHOSEN: f"{sample.start} {right}",
                REJECTED: f"{sample.start} {wrong[sample.drawn.query]}",
            }
            lines.write(json.dumps(pair) + "\n")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="its tokenizer and chat template are used")
    parser.add_argument("--train", type=Path, required=True, help="documents of the pairs")
    parser.add_argument("--held_out", type=Path, required=True, help="documents of the questions")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--characters", type=int, default=10_000, help="of an excerpt")
    lengths = 8192, 10240, 12288, 14336, 16384
    text = "tokens of prompt and answer"
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths, help=text)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    for file in (args.train, args.held_out):
        if not file.is_file():
            parser.error(f"{file}: must be a file of documents")
    try:
        _, tokenizer = open_decoder(args.model, None, lambda line: print(line, file=sys.stderr))
        encode = encoder(tokenizer, chat=True)
    except (OSError, ValueError) as error:
        parser.error(describe(error))
    args.out.mkdir(parents=True, exist_ok=True)
    known: Collection[str] = ()
    for documents, count, questions, pairs in (
        (args.train, args.pairs, "train_questions.jsonl", "pairs.jsonl"),
        (args.held_out, args.questions, "questions.jsonl", "held_out_pairs.jsonl"),
    ):
        file = args.out / questions
        asked, known = ask(documents, args.characters, args.seed, known)
        wrong = write_questions(file, asked, count, tokenizer, int(SHARE * min(args.lengths)))
        source = Questions([str(file)], args.seed)
        how = dict(tokenizer=tokenizer, encode=encode, seed=args.seed, filler=source)
        samplers = [Sampler(QUESTIONS, TASKS[QUESTIONS], n, **how) for n in args.lengths]
        write_pairs(args.out / pairs, source, wrong, samplers)
        print(f"{count} of {len(asked)} questions, about {len(source.documents)} excerpts: {file}")


if __name__ == "__main__":
    main()
