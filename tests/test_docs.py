"""The documents: their code runs, their links and paths exist, their keys and flags are known."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import config_reference
import pytest
import tables
from weights.hf.cases import ENCODERS
from weights.hf.cases import config as hf_config
from weights.hf.loading import random_base

import bptjax
from bptjax.cli import main as cli
from bptjax.cli.compare import CompareConfig
from bptjax.config import Config
from bptjax.config_parser import parse
from bptjax.data.tokenizer import ByteTokenizer
from bptjax.parsing.keys import flatten
from bptjax.weights.hf.families import FAMILIES, MULTIMODAL

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
KEYS = flatten(Config()).keys()
GROUPS = {key.split(".")[0] for key in KEYS if "." in key}
# Where renamed keys may stand.
HISTORY = "CHANGELOG.md"


def blocks(document, language=""):
    """Returns the fenced blocks of a language."""
    text = document.read_text()
    return [code for name, code in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
            if name == language]  # fmt: skip


def prose(document):
    return re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)


def inline_code(document):
    return re.findall(r"`([^`\n]+)`", prose(document))


def commands(document):
    """Returns the `bptjax` commands of the shell blocks, as lists of words."""
    lines = [line for code in blocks(document) for line in code.replace("\\\n", "").splitlines()]
    found = [line.split("bptjax ", 1)[1] for line in lines if ".venv/bin/bptjax " in line]
    return [shlex.split(line) for line in found]


def is_key(key):
    """Whether it is a config key, or a key in a mapping that is one."""
    return key in KEYS or key.startswith("model.rope_parameters.")


def each(*documents):
    return pytest.mark.parametrize("document", documents or DOCUMENTS, ids=lambda d: d.name)


def test_the_readme_is_short_and_links_every_document():
    text = README.read_text()
    assert len(text.splitlines()) <= 200
    assert {d.name for d in DOCUMENTS if f"({d.relative_to(ROOT)})" not in text} == {"README.md"}


@pytest.fixture
def my_model(tmp_path, monkeypatch):
    """The directory `my-model` of the documents. A run on it is checked, and not started."""
    monkeypatch.chdir(tmp_path)
    raw = hf_config("llama")
    raw.vocab_size = ByteTokenizer.vocab_size
    ByteTokenizer().save(random_base(tmp_path / "my-model", raw))

    def train(config):
        (tmp_path / "run.yaml").write_text(json.dumps(config))
        return parse([f"--config={tmp_path / 'run.yaml'}"]).model.name_or_path

    monkeypatch.setattr(bptjax, "train", train)


@each(*(d for d in DOCUMENTS if blocks(d, "python")))
def test_python_blocks_run(document, my_model):
    assert not blocks(document, "py")
    names = {"__name__": document.name}
    for code in blocks(document, "python"):
        exec(compile(code, document.name, "exec"), names)


@each()
def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.*)$", prose(target), re.M)
            slugs = [re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles]
            assert anchor in slugs, link


@each()
def test_paths_exist(document):
    rooms = ("bptjax/", "scripts/", "tests/", "configs/", "docs/", ".ci/", ".github/")
    for code in inline_code(document):
        if code.startswith(rooms) and "*" not in code and " " not in code:
            assert (ROOT / code).exists(), code


@each()
def test_keys_are_known(document):
    names = {key.rpartition(".")[2] for key in KEYS}
    for code in inline_code(document):
        key = re.match(r"(--)?(\w+\.\w[\w.]*)\b(?![/(])", code)
        file = code.endswith((".png", ".csv"))
        if key and not file and key[2].split(".")[0] in GROUPS:
            assert is_key(key[2]), code
        # A key without its group, as YAML has it.
        if (pair := re.match(r"(\w+): \S", code)) and pair[1] not in ("messages", "conversations"):
            assert pair[1] in names | {"chosen", "execution"}, code
    for code in blocks(document):
        for key in re.findall(r"--(\w+\.[\w.]+)", code):
            assert is_key(key), key


@each(*(d for d in DOCUMENTS if blocks(d, "yaml")))
def test_yaml_blocks_are_configs(document, tmp_path):
    for number, code in enumerate(blocks(document, "yaml")):
        file = tmp_path / f"{number}.yaml"
        file.write_text(code)
        assert parse([f"--config={file}"]) != Config()


@each(*(d for d in DOCUMENTS if commands(d)))
def test_commands_are_known(document, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    empty = tmp_path / "run.yaml"
    empty.write_text("seed: 0")
    for name, *flags in commands(document):
        if name in cli.PARSERS:
            cli.PARSERS[name]().parse_args(flags)
        else:
            kind = CompareConfig if name == "compare" else Config
            parse([str(empty) if flag == empty.name else flag for flag in flags], kind=kind)


def test_the_readme_fine_tunes_what_it_previews():
    """The four commands: one config for the preview and the run, and the run's directory after."""
    preview, train, generate, convert = [c for c in commands(README) if "--config" not in c]
    names = [command[0] for command in (preview, train, generate, convert)]
    assert names == ["preview", "train", "generate", "convert"]
    config = parse(train[1:])
    assert parse(preview[1:]).data == config.data
    assert config.model.name_or_path == "my-model" and config.adapter.type == "qlora"
    assert cli.PARSERS["generate"]().parse_args(generate[1:]).model == config.run_dir
    assert cli.PARSERS["convert"]().parse_args(convert[1:]).source == config.run_dir


def test_every_family_is_listed():
    text = (ROOT / "docs" / "hugging_face.md").read_text()
    assert [name for name in (*FAMILIES, *MULTIMODAL) if f"`{name}`" not in text] == []
    decoders = FAMILIES.keys() - {name.split(":")[0] for name in ENCODERS}
    count = f"{len(decoders)} decoder families, plus the text part of {len(MULTIMODAL)} multimodal"
    assert count in README.read_text()


def test_the_test_command_is_one():
    """.ci/run takes it from the README."""
    pattern = r"^python3 -m venv .* -m pytest$"
    (command,) = re.findall(pattern, README.read_text(), re.M)
    assert re.findall(pattern, (ROOT / "CONTRIBUTING.md").read_text(), re.M) == [command]
    assert f"'{pattern}'" in (ROOT / ".ci" / "run").read_text()


def test_the_printed_loss_is_the_code():
    (code,) = (c for c in blocks(ROOT / "docs" / "extending.md") if "PairLoss(" in c)
    source = (ROOT / "bptjax" / "objectives" / "dpo.py").read_text()
    assert [part for part in code.split("\n\n") if part not in source] == []


def test_the_config_reference_is_up_to_date():
    assert config_reference.REFERENCE.read_text() == config_reference.reference()


def test_the_config_reference_follows_the_dataclasses(monkeypatch):
    text = config_reference.reference()
    for key in KEYS:
        assert f"| `{key.rpartition('.')[2]}` |" in text
    assert config_reference.describe(int | None) == "integer"
    assert config_reference.describe(str | list[str]) == "text or list of text"


def test_the_facts_of_the_readme_have_rows():
    facts = "".join(line for line in README.read_text().splitlines(True) if line.startswith("- "))
    figures = re.findall(r"[\d.]+ GiB|[\d,]{5,}(?=\*\* tokens| tokens)", facts)
    assert len(figures) > 5
    for figure in figures:
        assert f" {figure}" in tables.headline(), figure


def test_the_version_is_the_newest_of_the_changelog():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.findall(r"^## (\S+)", (ROOT / HISTORY).read_text(), re.M)[0] == version
