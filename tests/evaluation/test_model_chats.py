"""scripts/model_chats.py: chats of a random model, without answers that do not end."""

import json
import random

import model_chats
import pytest
from chats import CHATML, raw_tokenizer
from weights.hf.cases import config
from weights.hf.loading import random_base


def test_prompts_about_topics_differ():
    for count in (1000, 3000):
        found = model_chats.about_topics(count, random.Random(0))
        assert len({*found}) == len(found) == count
        assert not any("{" in prompt for prompt in found)
    with pytest.raises(ValueError, match="36000 prompts about topics: must be at most 27560"):
        model_chats.about_topics(40_000, random.Random(0))


@pytest.mark.thorough
def test_chats_end_and_differ(tmp_path, monkeypatch):
    """The last batch is not full. A random model ends about half of its answers."""
    raw = config("llama")
    raw.vocab_size = 288
    random_base(tmp_path / "base", raw)
    raw_tokenizer("bytes", CHATML).save_pretrained(tmp_path / "base")
    for name in ("train", "held_out"):
        lines = "".join(f"#define {name.upper()}_{i} {i}\n" for i in range(100))
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(dict(text=lines)) + "\n")
    monkeypatch.setattr(model_chats, "LENGTHS", (50, 100))
    asked = []
    answers = model_chats.answers

    def noted(model, tokenizer, prompts, **how):
        found = list(answers(model, tokenizer, prompts, **how))
        asked.append(dict(zip(prompts, found, strict=True)))
        return found

    monkeypatch.setattr(model_chats, "answers", noted)

    flags = [f"--{name}={tmp_path / name}.jsonl" for name in ("train", "held_out")]
    flags += [f"--model={tmp_path / 'base'}", f"--out={tmp_path}", "--device=cpu"]
    flags += ["--prompts=22", "--held_out_prompts=10", "--batch=16", "--new_tokens=200"]
    model_chats.main(flags)
    train, held_out = asked
    assert len(train) == 22 and len(held_out) == 10 and not train.keys() & held_out.keys()
    assert sum("TRAIN_" in prompt for prompt in train) == 11
    assert sum("HELD_OUT_" in prompt for prompt in held_out) == 5
    for name, answered in (("chats", train), ("held_out_chats", held_out)):
        chats = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        ended = {prompt: answer for prompt, answer in answered.items() if answer is not None}
        assert 0 < len(ended) < len(answered)
        assert chats == [
            dict(
                messages=[
                    dict(role="user", content=prompt),
                    dict(role="assistant", content=answer),
                ]
            )
            for prompt, answer in ended.items()
        ]
