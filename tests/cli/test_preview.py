"""`bptjax preview`: what it says of the data is what a run trains on."""

import json

import numpy as np
import pytest
from chats import CALLS, THINKING_MARKED, TOOLS, raw_tokenizer

from bptjax.cli.main import main
from bptjax.cli.preview import marked_text
from bptjax.data.encode import encode
from bptjax.data.marked import marked, next_tokens, own_tokens
from bptjax.data.text import open_documents
from bptjax.data.tokenizer import ByteTokenizer

FORMATS = {
    "messages": (
        {
            "messages": [
                {"role": "user", "content": "1 + 1?"},
                {"role": "assistant", "content": "Two"},
            ]
        },
        "### Human: 1 + 1?\n### Assistant:[[ Two]]",
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "A?"}, {"from": "gpt", "value": "B"}]},
        "### Human: A?\n### Assistant:[[ B]]",
    ),
    "alpaca": ({"instruction": "Add", "input": "1 2", "output": "3"}, "### Response:[[3]]"),
    "self_instruct": ({"prompt": "Q: ", "completion": "A"}, "Q: [[A]]"),
    "prompt_answer": ({"prompt": "Q= ", "answer": "A"}, "Q= [[A]]"),
    "hh_rlhf": (
        {"chosen": "\n\nHuman: Hi\n\nAssistant: Yes\n\nHuman: Bye\n\nAssistant: No"},
        "\n\nHuman: Hi\n\nAssistant:[[ Yes]]\n\nHuman: Bye\n\nAssistant:[[ No]]",
    ),
    "text": ({"text": "plain text"}, "[[plain text]]"),
    "dolly": ({"instruction": "Add", "context": "1 2", "response": "3"}, "### Response:[[3]]"),
    "question_answer": ({"question": "A?", "answer": "B"}, "### Human: A?\n### Assistant:[[ B]]"),
}


def run(capsys, rows, tmp_path, *flags, seq_len=64):
    """(exit code, output, errors) of a preview of these records."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    defaults = [f"--data.path={path}", f"--train.seq_len={seq_len}", "--data.eval_fraction=0"]
    code = main(["preview", *defaults, *flags])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_in_the_loss_are_marked(name, tmp_path, capsys):
    """The first record, and the packed sequences, of every record format."""
    row, wanted = FORMATS[name]
    flags = ["--sequences=2", "--data.packing=best_fit"]
    code, out, _ = run(capsys, [row] * 60, tmp_path, *flags, seq_len=256)
    assert code == 0
    first, *sequences = out.split("first record, as trained on")[1].split("─ sequence ")
    assert wanted in first
    assert len(sequences) == 2
    for sequence in sequences:
        assert sequence.count(wanted) == sequence.count("\ndocument ") >= 1
    assert "60 records" in out and "positions 0 to " in out
    assert (
        f"format of {tmp_path / 'rows.jsonl'}: {name} ({', '.join(row)})".replace(
            "instruction, input, output", "instruction, output, input"
        ).replace("instruction, context, response", "instruction, response, context")
        in out
    )


def test_tools_and_reasoning(tmp_path, capsys):
    """Through a chat template with marks: the marked text is transformers' assistant mask."""
    raw = raw_tokenizer("bytes", THINKING_MARKED)
    raw.save_pretrained(tmp_path / "tokenizer")
    row = {"messages": CALLS, "tools": TOOLS, "source": "a"}
    flags = [f"--data.tokenizer={tmp_path / 'tokenizer'}", "--sequences=1"]
    code, out, _ = run(capsys, [row] * 20, tmp_path, *flags, seq_len=512)
    assert code == 0
    assert "the chat template does not read source (20)" in out
    found = raw.apply_chat_template(
        CALLS, tools=TOOLS, return_assistant_tokens_mask=True, return_dict=True
    )
    ids, mask = np.array(found["input_ids"]), np.array(found["assistant_masks"], bool)
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1), len(ids)]
    wanted = ""
    for start, stop in zip(edges, edges[1:], strict=False):
        text = raw.decode(ids[start:stop])
        wanted += f"[[{text}]]" if mask[start] else text
    assert wanted in out.split("as trained on")[1]
    assert '"tool_calls"' in out.split("as read")[1]


@pytest.mark.parametrize("shared", [False, True])
def test_labeled_answers_are_shown_with_the_answer_of_another_record(shared, tmp_path, capsys):
    rows = [dict(prompt="no completion")]
    rows += [dict(prompt=f"{n}+1=", completion=f"{n + 2}", label=n % 2 > 0) for n in range(1, 40)]
    flags = ["--objective.type=kto", "--data.tokenizer=byte", "--data.packing=best_fit"]
    flags += [f"--objective.share_prompt={str(shared).lower()}", "--sequences=1"]
    code, out, error = run(capsys, rows, tmp_path, *flags, seq_len=256)
    assert code == 0, error
    text = " ".join(out.split())
    assert "1 bad record left out" in text, text
    assert "prompt: 1+1= completion, label true: 3 ─" in text
    trained = out.split("first record, as trained on")[1].split("─ sequence 1")[0]
    note = ", 4 of them shared" if shared else ""
    assert f"\ndesirable after a prompt of 5 tokens{note}: " in trained
    assert f"\ncompletion of another record, for KL alone, after a prompt of 5 tokens{note}: " in (
        trained
    )
    own, other = [line for line in trained.splitlines() if line.startswith("1+1=")]
    assert own == "1+1=[[3]]" and other.startswith("1+1=[[") and other != own
    sequence = out.split("─ sequence 1")[1]
    assert "undesirable after a prompt of" in sequence and "[[" in sequence


def test_counts_and_plot(tmp_path, capsys):
    """Bad, too long and unlabeled records are counted, not shown as a traceback."""
    good = {"prompt": "ab:", "answer": "cd"}
    rows = [good] * 40 + [{"prompt": "x" * 100, "answer": "y"}, {"prompt": "no answer"}]
    code, out, _ = run(capsys, rows, tmp_path, f"--out={tmp_path / 'plots'}", "--sequences=1")
    assert code == 0
    account = " ".join(out.split())
    assert "1 of 42 records" in out and "longer than train.seq_len=64 and were dropped" in account
    assert "1 bad record left out\n" in out and "bad record: " in out and "record 42" in out
    assert "bptjax train stops at bad records unless data.bad_records=skip" in out
    assert "bad_records.jsonl" not in out
    assert "up to         8 ████" in out
    assert "steps: about " in out
    assert (tmp_path / "plots" / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_the_format_of_each_source_is_named(tmp_path, capsys):
    rows = {
        "a": [{"q": {"text": "Q"}, "a": "A"}] * 20,
        "b": [{"body": "some text"}] * 20,
        "c": [{"prompt": "Q", "answer": "A"}] * 15 + [{"instruction": "I", "response": "R"}] * 5,
    }
    for name, own in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    (tmp_path / "d.txt").write_text("text")
    fields = {"a": {"question": "q.text", "answer": "a"}, "b": {"text": "body"}}
    sources = [{"path": f"{tmp_path}/{x}.jsonl", "fields": fields.get(x)} for x in rows]
    sources.append({"path": f"{tmp_path}/d.txt"})
    flags = [f"--data.sources={json.dumps(sources)}", "--data.packing=best_fit", "--sequences=1"]
    assert main(["preview", *flags, "--data.eval_fraction=0", "--train.seq_len=64"]) == 0
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("format of ")]
    assert [line.removeprefix(f"format of {tmp_path}/") for line in lines] == [
        "a.jsonl: question_answer (question from q.text, answer from a)",
        "b.jsonl: text (text from body)",
        "c.jsonl: 15 of 20 records prompt_answer (prompt, answer), "
        "5 of 20 records dolly (instruction, response)",
    ]


def test_the_held_out_documents_are_those_of_the_run(tmp_path, capsys):
    """Of a new one, and of one that an older version started."""
    rows = (json.dumps({"text": "x" * n}) for n in range(100, 300))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    command = ["preview", f"--data.path={tmp_path / 'rows.jsonl'}", "--train.seq_len=64"]
    command += ["--data.eval_fraction=0.1", f"--run_dir={tmp_path / 'run'}", "--sequences=1"]

    def held_out(*flags):
        assert main([*command, *flags]) == 0
        lines = capsys.readouterr().out.splitlines()
        return next(line for line in lines if line.startswith("held-out data: "))

    found = {name: held_out(f"--data.eval_split={name}") for name in ("random", "spaced")}
    assert held_out() == found["random"] != found["spaced"]
    assert held_out("--data.seed=1") not in found.values()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("data: {eval_fraction: 0.1}\n")
    assert held_out() == found["spaced"]


@pytest.mark.parametrize("names", [["good.jsonl", "bad.jsonl"], ["bad.jsonl"]])
def test_a_source_without_an_example_is_not_drawn(names, tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "no answer"}\n')
    (tmp_path / "good.jsonl").write_text('{"prompt": "ab:", "answer": "cd"}\n' * 40)
    sources = [{"path": str(tmp_path / name)} for name in names]
    flags = [f"--data.sources={json.dumps(sources)}", f"--out={tmp_path / 'plots'}"]
    assert main(["preview", *flags, "--data.eval_fraction=0", "--train.seq_len=64"]) == 2
    assert "a token that counts in the loss" in capsys.readouterr().err
    assert (tmp_path / "plots" / "lengths.png").exists() == ("good.jsonl" in names)


def test_bad_files_are_named_with_the_effect_on_training(tmp_path, capsys):
    (tmp_path / "latin1.txt").write_bytes("Käse".encode("latin-1"))
    (tmp_path / "good.txt").write_text("some text " * 40)
    command = ["preview", f"--data.path={tmp_path}/*.txt", "--train.seq_len=64"]
    command.append("--data.eval_fraction=0")
    for flags, stops in (([], True), (["--data.bad_records=skip"], False)):
        assert main([*command, *flags]) == 0
        out = capsys.readouterr().out
        assert f"bad record: {tmp_path / 'latin1.txt'}: " in out
        assert ("train stops at bad records" in out) == stops
    code, out, err = run(capsys, [{"other": "a"}] * 9, tmp_path)
    assert code == 2 and "9 bad records left out\n" in out
    assert "correct the bad records above" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--sequences=0"], "sequences=0: must be at least 1"),
        (["--shown_documents=0"], "shown_documents=0: must be at least 1"),
        (["--seconds=0"], "seconds=0.0: must be finite and positive"),
        (["--sequencez=1"], "unknown flag --sequencez; nearest: --sequences"),
        (["--data.tokenizer=/nowhere"], "data.tokenizer='/nowhere'"),
    ],
)
def test_bad_input_is_one_line(flags, message, tmp_path, capsys):
    code, _, err = run(capsys, [{"text": "some text " * 40}], tmp_path, *flags)
    assert code == 2 and message in err and len(err.splitlines()) == 1


def test_the_middle_of_a_long_document_is_left_out(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 50 + "b" * 900 + "c" * 50)
    (example,) = encode(open_documents(tmp_path / "a.txt")[0], ByteTokenizer())
    text = marked_text(marked(example, ByteTokenizer(), 100), colored=False).plain
    assert text == "[[" + "a" * 49 + "]] … 902 tokens … [[" + "c" * 49 + "]]"


def test_the_middle_of_many_documents_is_left_out(tmp_path, capsys):
    """The counts are of the tokens that are not shown, of documents and in the first record."""
    rows = [{"text": chr(97 + n) * 20} for n in range(12)]
    flags = ["--data.packing=best_fit", "--data.shuffle=false", "--sequences=1"]
    for shown, gap in ((3, "documents 3 to 11"), (11, "document 7"), (12, None)):
        flags[3:] = [f"--shown_documents={shown}"]
        code, out, _ = run(capsys, rows, tmp_path, *flags, seq_len=12 * 21)
        (sequence,) = out.split("─ sequence 1: ")[1:]
        lines = sequence.splitlines()[1:]
        numbers = [int(line.split()[1][:-1]) for line in lines if line.startswith("document ")]
        head = (shown + 1) // 2
        assert code == 0 and numbers == [*range(1, head + 1), *range(13 - shown + head, 13)]
        notes = [line for line in lines if line.startswith("… ")]
        count = 21 * (12 - shown)
        assert notes == [f"… {gap} left out: {count} tokens, {count} labels in the loss …"] * bool(
            gap
        )


def test_the_middle_of_a_long_record_is_left_out(tmp_path, capsys):
    chat = {"messages": [{"role": r, "content": r[0] * 500} for r in ("user", "assistant") * 9]}
    for row, left_out in (
        ({"text": "a" * 50 + "b" * 900 + "c" * 50}, "a … 960 characters … c"),
        ({"input_ids": [7] * 500}, "7 7  … 959 characters …  7 7"),
        (chat, " characters … "),
    ):
        flags = ["--shown_tokens=10", "--sequences=1", "--data.packing=none"]
        code, out, _ = run(capsys, [row], tmp_path, *flags, seq_len=2**14)
        assert code == 0 and left_out in out.split("first record, as read")[1].split("─ ")[0]
        assert max(map(len, out.split("first record, as read")[1].split("\n"))) < 250


@pytest.mark.parametrize(
    "row",
    [
        {"input_ids": []},
        {"input_ids": [5]},
        {"input_ids": [5, 6], "labels": [-100, -100]},
        {"input_ids": [5, 6], "labels": [5, -100]},
    ],
)
def test_records_without_a_label_are_refused(row, tmp_path, capsys):
    """An empty example ended in a traceback."""
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(row) + "\n")
    flags = [f"--data.path={file}", "--data.eval_fraction=0", "--train.seq_len=64"]
    assert main(["preview", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the 1 document in shard 0 of 1: must have a token that counts")
    assert error.endswith("all texts and answers are empty, or all labels are -100\n")


@pytest.mark.parametrize("text", [next_tokens, own_tokens])
def test_an_empty_example_has_no_text(text):
    empty = np.array([], np.int32)
    example = {"tokens": empty, "labels": empty}
    assert not list(marked(example, ByteTokenizer(), 9, text))


def test_few_tokens_are_padded_with_a_warning(tmp_path, capsys):
    row = {"prompt": "ab:", "answer": "cd"}
    code, out, _ = run(capsys, [row] * 3, tmp_path, "--sequences=1", seq_len=4096)
    assert code == 0 and "document 3, positions 0 to 5" in out
    wanted = "warning: 18 tokens, fewer than train.seq_len=4096: padding completes the sequences"
    assert wanted in " ".join(out.split())


def test_passes_over_each_source_are_told(tmp_path, capsys):
    sources = []
    for name, count, weight in (("few", 4, 0.5), ("many", 200, 0.5)):
        rows = "".join(json.dumps({"text": "some text " * 20}) + "\n" for _ in range(count))
        (tmp_path / f"{name}.jsonl").write_text(rows)
        sources.append({"path": str(tmp_path / f"{name}.jsonl"), "weight": weight})
    command = ["preview", f"--data.sources={json.dumps(sources)}", "--data.eval_fraction=0"]
    command.append("--train.seq_len=64")
    assert main([*command, "--train.epochs=5"]) == 0
    out = capsys.readouterr().out
    assert f"passes over the data in train.epochs=5: {tmp_path / 'few.jsonl'} 5, " in out
    assert f"{tmp_path / 'many.jsonl'} 0.1" in out
    assert f"warning: 5 passes over {tmp_path / 'few.jsonl'}, more than 4: lower its weight" in out
    assert main([*command, "--train.max_steps=10"]) == 0
    assert "warning" not in capsys.readouterr().out
