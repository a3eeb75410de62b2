"""scripts/document_pairs.py: its questions have one answer, and training has the prompts of
evaluation."""

import json
import re

import document_pairs
import linux_documents
import pytest
from chats import CHATML, raw_tokenizer
from weights.hf.cases import config
from weights.hf.loading import random_base

from bptjax.data.config import DataConfig
from bptjax.data.examples import documents
from bptjax.data.preferences import PREFERENCE, encode_preference
from bptjax.data.text import open_documents
from bptjax.data.tokenizer import load_tokenizer
from bptjax.tasks import TASKS
from bptjax.tasks.questions import Questions
from bptjax.tasks.sample import Sampler, encoder

LENGTHS = [1200, 1600]


def header(name: str) -> str:
    """A file with six numbers, and macros that no question may ask for."""
    numbers = [f"#define {name}_{i}\t0x{i}{i}{ord(name[0]):x} /* number {i} */" for i in range(6)]
    others = ["#define SHARED 4321", f"#define {name}_A 777", f"#define {name}_B 777"]
    others += [f"#define {name}_F(x) 88", f"#define {name}_SUM (55 + 66)", f"#define {name}_0X 1"]
    return f"=== {name}.h ===\n" + "\n".join([*numbers, *others]) + "\n"


def write(file, names):
    rows = [dict(directory=name[0], text=header(name)) for name in names]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def made(tmp_path):
    raw = config("llama")
    raw.vocab_size = 288
    random_base(tmp_path / "base", raw)
    raw_tokenizer("bytes", CHATML).save_pretrained(tmp_path / "base")
    write(tmp_path / "train.jsonl", ["AA", "AB", "BA", "CA"])
    # AA is also in the training documents.
    write(tmp_path / "held_out.jsonl", ["AA", "DA", "EA"])

    def make(out, pairs=12, seed=0):
        flags = [f"--{name}={tmp_path / name}.jsonl" for name in ("train", "held_out")]
        flags += [f"--model={tmp_path / 'base'}", f"--out={tmp_path / out}", f"--seed={seed}"]
        flags += [f"--pairs={pairs}", "--questions=6", "--characters=400"]
        document_pairs.main([*flags, "--lengths", *map(str, LENGTHS)])
        return tmp_path / out

    return make


def records(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_questions_have_one_answer(made):
    out = made("out")
    train, held_out = (records(out / f"{x}questions.jsonl") for x in ("train_", ""))
    assert len(train) == 12 and len(held_out) == 6
    for record in train + held_out:
        (name,) = re.findall(r"macro (\w+)\?", record["question"])
        assert re.fullmatch(r"[A-E]A?B?_[0-5]", name)
        assert f"#define {name}\t{record['answer']} " in record["document"]
        assert record["document"].count(record["answer"]) == 1
    # Directories in turn, and the documents of A.
    asked = [re.findall(r"macro (\w\w)", record["question"])[0] for record in train]
    assert [sum(x[0] == letter for x in asked) for letter in "ABC"] == [4, 4, 4]
    assert asked.count("AA") == asked.count("AB") == 2
    assert {record["document"][4:6] for record in held_out} == {"DA", "EA"}
    for pair in records(out / "pairs.jsonl"):
        assert pair["chosen"] != pair["rejected"]
        values = [pair[x].removeprefix("Answer: ") for x in ("chosen", "rejected")]
        excerpt = next(r["document"] for r in train if r["answer"] == values[0])
        assert values[1] in excerpt


def test_pairs_have_the_prompts_of_an_evaluation(made, tmp_path):
    """The same token ids, up to the answer."""
    out = made("out")
    tokenizer = load_tokenizer(tmp_path / "base")
    source = Questions([str(out / "questions.jsonl")], 0)
    how = dict(tokenizer=tokenizer, encode=encoder(tokenizer, True), seed=0, filler=source)
    samplers = [Sampler("questions", TASKS["questions"], n, **how) for n in LENGTHS]
    pairs = open_documents([str(out / "held_out_pairs.jsonl")], format=PREFERENCE)
    for index, pair in enumerate(pairs):
        sample = samplers[index % 2][index]
        (example,) = encode_preference(pair, tokenizer, DataConfig())
        for own in documents(example):
            assert own["tokens"][: len(sample.ids)].tolist() == sample.ids.tolist()
            assert len(own["tokens"]) <= LENGTHS[index % 2]


def test_the_seed_determines_the_files(made):
    first, again, other = (made(name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    for file in first.iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes()
        assert file.read_bytes() != (other / file.name).read_bytes()


def test_wrong_paths_are_one_line(tmp_path, capsys):
    (tmp_path / "file.jsonl").touch()
    there, gone = str(tmp_path / "file.jsonl"), str(tmp_path / "gone")
    for flags in (
        [f"--model={gone}", f"--train={there}", f"--held_out={there}"],
        [f"--model={there}", f"--train={gone}", f"--held_out={there}"],
    ):
        with pytest.raises(SystemExit, match="2"):
            document_pairs.main([*flags, f"--out={tmp_path / 'out'}"])
        assert f"{gone}: must be a " in capsys.readouterr().err.splitlines()[-1]
    for tarball, message in (
        (gone, "No such file or directory"),
        (there, "file could not be opened"),
    ):
        with pytest.raises(SystemExit, match="2"):
            linux_documents.main([tarball, str(tmp_path / "out")])
        assert f"error: {tarball}: {message}" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_too_few_questions_are_refused(made):
    with pytest.raises(ValueError, match="train_questions.jsonl: the documents give 24 of 25"):
        made("out", pairs=25)
