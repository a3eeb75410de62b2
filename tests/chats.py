"""Short chat templates, small tokenizers and files of records for tests."""

import json
import tempfile

import pyarrow as pa
import pyarrow.parquet as pq

from bptjax.data.text import open_documents

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Marks the same text as the prefixes of CHATML give.
CHATML_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|header|>{{ m.role }}<|/header|>{{ '\\n\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}<|eot|>{% endgeneration %}"
    "{% else %}{{ m.content | trim }}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|/header|>{{ '\\n\\n' }}{% endif %}"
)
# The system prompt moves into the last question, and nothing stands before an answer.
INST = (
    "{% set last = messages | selectattr('role', 'equalto', 'user') | list | last %}"
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] "
    "{% if m == last and messages[0].role == 'system' %}{{ messages[0].content }} {% endif %}"
    "{{ m.content }} [/INST]{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% endif %}{% endfor %}"
)
# Tools, tool calls, and reasoning of the answers after the last question only.
_CALLS = (
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}"
)
_THINKING = (
    "{% set at = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set at.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}OPEN"
    "{% if loop.index0 > at.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}" + _CALLS + "<|im_end|>CLOSE\n"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
THINKING = _THINKING.replace("OPEN", "").replace("CLOSE", "")
THINKING_MARKED = _THINKING.replace("OPEN", "{% generation %}").replace(
    "CLOSE", "{% endgeneration %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello there"},
    {"role": "user", "content": "One, two?"},
    {"role": "assistant", "content": "π 🙂"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALLS = [
    {"role": "user", "content": "1 + 2?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I add.",
        "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
        ],
    },
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3.", "reasoning_content": "So it is."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes", "reasoning_content": "Hm."},
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|header|>", "<|/header|>"]
SPECIAL += ["<|eot|>", "[INST]", "[/INST]"]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TEXTS = ["Hello there, be brief. One two three", "Below is an instruction that describes a task"]


def raw_tokenizer(kind, template=None, bos=True):
    """A transformers tokenizer.

    Args:
      kind: `bytes` (GPT-2's kind), `metaspace` (a space before a text's first word), or `prepend`
        (a space before every stretch between special tokens, as Llama 2's).
      bos: the tokenizer puts <s> in front of a text.
    """
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )
    from transformers import PreTrainedTokenizerFast

    letters = [chr(i) for i in range(33, 127)] + ["\n", "▁"]
    model = Tokenizer(models.BPE(unk_token="<unk>"))
    if kind == "bytes":
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        letters = pre_tokenizers.ByteLevel.alphabet()
    elif kind == "metaspace":
        model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        model.decoder = decoders.Metaspace(prepend_scheme="first")
    else:
        model.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        model.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    model.train_from_iterator(
        TEXTS * 2,
        trainers.BpeTrainer(
            vocab_size=280 if kind == "bytes" else 170,
            special_tokens=SPECIAL,
            initial_alphabet=letters,
            show_progress=False,
        ),
    )
    if bos:
        model.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    found = PreTrainedTokenizerFast(
        tokenizer_object=model, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    found.add_tokens(ADDED)
    found.chat_template = template
    return found


def loaded(raw, directory=None):
    """Our tokenizer of it, through a directory."""
    from bptjax.data.tokenizer import load_tokenizer

    directory = directory or tempfile.mkdtemp()
    raw.save_pretrained(directory)
    return load_tokenizer(directory)


def read_records(tmp_path, *rows, name="a.jsonl", format="auto"):
    """The documents of a file with these records."""
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(list(rows)), tmp_path / name)
    else:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(open_documents(tmp_path / name, format=format))
