"""`bptjax COMMAND …`: the commands, and the flags of commands that read no config.

Commands are imported after their flags are parsed, because importing jax takes most of a second.
"""

import sys
from argparse import SUPPRESS, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable
from importlib import import_module
from itertools import chain
from pathlib import Path
from textwrap import fill
from typing import Any

from bptjax.cli.run_command import end_imports_at_interrupts, run_command
from bptjax.parsing.flags import DTYPES, EXIT_CODES, Parser, nearest
from bptjax.parsing.other_names import with_flags

COMMANDS = {
    "train": "train or fine-tune a model, or resume a run",
    "preview": "show what a run would train on, without its model",
    "plan": "predict the memory of a run's step on any GPU, without one",
    "profile": "show the time of a step by part, and its memory over the step",
    "generate": "continue prompts with a model",
    "chat": "talk with a model in the terminal",
    "evaluate": "measure held-out loss, perplexity by position and use of the context",
    "convert": "convert checkpoints and adapters from and to Hugging Face and GGUF",
    "compare": "time implementations of a transformer layer",
    "configs": "list the configs that come with bptjax, or copy one",
    "doctor": "check this machine: versions, devices, kernels, speed",
}


def main(argv: list[str] | None = None) -> int:
    """Runs the command named in `argv`. Returns its exit code."""
    end_imports_at_interrupts()
    argv = list(sys.argv[1:] if argv is None else argv)
    name = argv[0] if argv else ""
    if name in PARSERS:
        return launch(name, argv[1:])
    if name in COMMANDS:
        # The module's own `main` reports errors too, but not those of its imports.
        return run_command(lambda argv: import_module(f"bptjax.cli.{name}").main(argv), argv[1:])
    return run_command(_overview, argv)


def launch(name: str, argv: list[str] | None = None) -> int:
    """Parses the flags of a command in `PARSERS` and runs it. Returns its exit code."""

    def command(argv: list[str]) -> int:
        parser = PARSERS[name]()
        arguments = parser.parse_args(argv)
        if name in ("generate", "chat"):
            warn("starting: loading libraries")
        try:
            return import_module(f"bptjax.cli.{name}").run(arguments)
        except ValueError as error:
            text = with_flags(str(error), parser._option_string_actions)
            if text == str(error):
                raise
            raise ValueError(text) from error

    return run_command(command, argv)


def warn(line: str) -> None:
    """Prints a line on stderr."""
    print(line, file=sys.stderr)


def _overview(argv: list[str]) -> int:
    if argv and not argv[0].startswith("-"):
        known = nearest(argv[0], COMMANDS) or f"; known: {', '.join(COMMANDS)}"
        raise ValueError(f"unknown command {argv[0]}{known}")
    lines = [f"  {name:<10}{text}" for name, text in COMMANDS.items()]
    parser = Parser(
        prog="bptjax",
        usage="%(prog)s COMMAND [--FLAG VALUE ...]",
        description="Long-context training in JAX.\n\ncommands:\n" + "\n".join(lines),
        epilog=f"`bptjax COMMAND --help` lists the flags of a command.\n\n{fill(EXIT_CODES, 78)}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    if not parser.parse_args(argv).version:
        raise ValueError(f"no command given: use one of {', '.join(COMMANDS)}; see bptjax --help")
    from importlib.metadata import version

    print(f"bptjax {version('bptjax')}")
    return 0


def _model_flags(parser: Parser, more: str = "", **how: Any) -> None:
    """Adds the flags of a model. `more` ends the help text of --model, `how` sets its action."""
    add = parser.add_argument_group("model").add_argument
    model = "Hugging Face, converted or run directory, or a hub id"
    add("--model", required=True, help=model + more, **how)
    add("--tokenizer", help="byte or a directory. If not set, the tokenizer of the model.")
    dtype = "dtype of the computation. If not set, float32 on a CPU with memory for it, else the "
    dtype += "dtype that a run computes in, or of the model."
    add("--dtype", choices=DTYPES, help=dtype)
    device = "device to run on. auto refuses the CPU of a machine with an NVIDIA GPU."
    add("--device", choices=["auto", "cpu", "gpu"], default="auto", help=device)


def _mesh_flags(parser: Parser) -> None:
    """Adds the flags of a mesh of devices."""
    add = parser.add_argument_group("devices").add_argument
    tp = "devices that shard heads, feed-forward network and vocabulary"
    add("--tp", type=int, default=1, help=tp)
    sp = "devices that shard the tokens of the key-value cache"
    add("--sp", type=int, default=1, help=sp)


def _sampling_flags(add: Callable[..., Any]) -> None:
    """Adds the flags of `Sampling`, --stop and --seed."""
    add("--temperature", type=float, help="0 takes the most likely token")
    add("--top_k", type=int, help="sample from the k most likely tokens; 0 for all")
    top_p = "sample from the most likely tokens that together have this probability"
    add("--top_p", type=float, help=top_p)
    min_p = "sample from tokens with at least this share of the largest probability"
    add("--min_p", type=float, help=min_p)
    penalty = "divides the logits of tokens that have occurred; 1 turns it off"
    add("--repetition_penalty", type=float, help=penalty)
    stop = "string that ends a continuation. May be repeated."
    add("--stop", action="append", default=[], help=stop)
    add("--seed", type=int, default=0, help="sampling seed")


def generate() -> Parser:
    """Returns the flags of `bptjax generate`."""
    parser = Parser(
        prog="bptjax generate",
        usage="%(prog)s --model MODEL --prompt TEXT [--FLAG VALUE ...]",
        description="Continues prompts with a Hugging Face checkpoint, a converted one, or a run.",
    )
    _model_flags(parser)
    add = parser.add_argument_group("prompts").add_argument
    add("--prompt", action="append", default=[], help="text to continue. May be repeated.")
    file = "text file that holds one prompt. May be repeated."
    add("--prompt_file", action="append", default=[], type=Path, help=file)
    add("--chat", action="store_true", help="prompts are user messages, in the chat template")
    add("--system", help="system message before each prompt; needs --chat")
    add("--prefill_chunk", type=int, default=2048, help="prompt tokens processed at a time")
    _mesh_flags(parser)
    defaults = "Defaults come from generation_config.json, or else temperature is 0.7 with --chat."
    add = parser.add_argument_group("sampling", defaults).add_argument
    most = "largest number of tokens in a continuation"
    add("--max_new_tokens", type=int, default=128, help=most)
    _sampling_flags(add)
    return parser


def chat() -> Parser:
    """Returns the flags of `bptjax chat`."""
    parser = Parser(
        prog="bptjax chat",
        usage="%(prog)s --model MODEL [--FLAG VALUE ...]",
        description="Talks with a model that has a chat template, one message a line. /reset "
        "starts a new chat, /save FILE writes this one as a record of training data, /exit or "
        "Ctrl-D ends. Ctrl-C stops an answer.",
    )
    _model_flags(parser)
    parser.add_argument("--system", help="system message, the start of each chat")
    defaults = "Defaults come from generation_config.json, or else temperature is 0.7."
    add = parser.add_argument_group("answers", defaults).add_argument
    most = "largest number of tokens in an answer"
    add("--max_new_tokens", type=int, default=1024, help=most)
    _sampling_flags(add)
    return parser


def _fields(text: str) -> dict[str, str]:
    """Parses `--fields` from YAML."""
    import yaml

    try:
        fields = yaml.safe_load(text)
    except yaml.YAMLError:
        fields = None
    if not isinstance(fields, dict) or not all(isinstance(x, str) for x in chain(*fields.items())):
        raise ArgumentTypeError(f"{text}: must be names and fields, {{name: field}}")
    return fields


def evaluate() -> Parser:
    """Returns the flags of `bptjax evaluate`."""
    parser = Parser(
        prog="bptjax evaluate",
        usage="%(prog)s --model MODEL [--data PATH] [--FLAG VALUE ...]",
        description="Measures the loss of a model on --data, as the evaluations of a run do, or "
        "with --perplexity its perplexity by position in long text; by --tasks whether it uses its "
        "context in prompts of --lengths tokens; and by --lm_eval its scores in tasks of "
        "lm-evaluation-harness. Prints tables and writes JSON and plots.",
    )
    _model_flags(parser, ". Repeated, compares models in the same tables.", action="append")
    _mesh_flags(parser)
    add = parser.add_argument_group("data").add_argument
    add("--data", help="file, directory or glob of text, records or chats")
    key = "field of a record that holds its text. If not set, that of the run, or text."
    add("--text_key", help=key)
    settings = "Other settings of data and train are those of the run in --model, or the defaults."
    add = parser.add_argument_group("held-out loss", settings).add_argument
    add("--format", help="data.format. If not set, that of the run, or auto.")
    fields = "data.fields, such as '{prompt: question, answer: meta.response}'"
    add("--fields", type=_fields, metavar="FIELDS", help=fields)
    length = "tokens per sequence. If not set, train.seq_len of the run, or up to 4096; with "
    length += "--lm_eval the positions of the model."
    add("--seq_len", type=int, help=length)
    batches = "largest number of batches, a sample of the data. If not set, all data."
    add("--batches", type=int, help=batches)
    add = parser.add_argument_group("perplexity by position").add_argument
    add("--perplexity", type=int, metavar="TOKENS", help="tokens read of each document")
    # The former name, which is close to --lengths.
    add("--length", type=int, help=SUPPRESS)
    short = "also measures the same tokens with only this number of tokens before each, and LongPPL"
    add("--short_context", type=int, metavar="TOKENS", help=short)
    add("--buckets", type=int, default=8, help="number of ranges of positions")
    add("--documents", type=int, default=16, help="largest number of documents, chosen at random")
    add = parser.add_argument_group("use of the context").add_argument
    tasks = "tasks of retrieval, tracking and counting, such as passkey and niah_single, or all"
    add("--tasks", nargs="+", default=[], metavar="NAME", help=tasks)
    lengths = "lengths of prompt and answer together, in tokens"
    add("--lengths", type=int, nargs="+", default=[], help=lengths)
    add("--samples", type=int, default=25, help="number of prompts for each task and length")
    haystack = "files of text or records to hide facts in, instead of made sentences"
    add("--haystack", nargs="+", default=[], metavar="FILES", help=haystack)
    questions = "records with a question about a document, for the task questions"
    add("--questions", nargs="+", default=[], metavar="FILES", help=questions)
    add = parser.add_argument_group("lm-evaluation-harness").add_argument
    tasks = 'its tasks, patterns such as mmlu_*, or YAML files; needs pip install -e ".[eval]"'
    add("--lm_eval", nargs="+", default=[], metavar="TASK", help=tasks)
    shots = "examples in each prompt. If not set, the number of the task."
    add("--num_fewshot", type=int, help=shots)
    add = parser.add_argument_group("prompts").add_argument
    plain = "prompts without the tokenizer's chat template"
    add("--no_chat", action="store_true", help=plain)
    save = "write prompts, answers and references to OUT/prompts"
    add("--save_prompts", action="store_true", help=save)
    add("--seed", type=int, default=0, help="seed of the documents and prompts")
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, default=Path("evaluation"), help="directory of JSON and plots")
    return parser


def convert() -> Parser:
    """Returns the flags of `bptjax convert`."""
    parser = Parser(
        prog="bptjax convert",
        usage="%(prog)s CONVERSION SOURCE OUT [--FLAG VALUE ...]",
        description="Converts checkpoints and adapters from and to Hugging Face, PEFT and GGUF.",
    )
    conversions = parser.add_subparsers(dest="conversion", metavar="CONVERSION", required=True)
    for name, source, out, text in (
        ("hf-to-bptjax", "DIR", "OUT", "Hugging Face directory to a bptjax one, layers stacked"),
        ("bptjax-to-hf", "RUN", "OUT", "newest checkpoint of a run, or a converted directory, to a "
         "Hugging Face directory"),
        ("merge-adapter", "RUN", "OUT", "adapter of a run or of PEFT, and its base model, to one "
         "Hugging Face directory"),
        ("export-adapter", "RUN", "OUT", "adapter of a run or of PEFT to a directory for PEFT or "
         "vLLM"),
        ("to-gguf", "MODEL", "FILE", "run, adapter (merged), converted or Hugging Face directory "
         "to a GGUF file, for llama.cpp and Ollama"),
        ("from-gguf", "FILE", "OUT", "GGUF file to a Hugging Face directory"),
    ):  # fmt: skip
        command = conversions.add_parser(
            name,
            prog=f"bptjax convert {name}",
            usage=f"%(prog)s {source} {out} [--FLAG VALUE ...]",
            help=text,
            description=f"Converts: {text}.",
        )
        command.add_argument("source", metavar=source, help="checkpoint or adapter to convert")
        new = "new file to write" if out == "FILE" else "new directory to write"
        command.add_argument("out", metavar=out, type=Path, help=new)
        if name == "to-gguf":
            kind = "f32, f16, bf16, q8_0, q5_1, q5_0, q4_1 or q4_0; or mxfp4 for experts"
            command.add_argument("--type", default="f16", help=kind)
            pre = "name of the tokenizer's pre-tokenizer in llama.cpp. If not set, recognized."
            command.add_argument("--pre", help=pre)
            lora = "write the adapter alone, for the base model's own GGUF file"
            command.add_argument("--lora", action="store_true", help=lora)
        if name in ("bptjax-to-hf", "merge-adapter", "export-adapter"):
            hub = "repository on the Hugging Face hub to upload the result to; a new one is private"
            command.add_argument("--push_to_hub", metavar="OWNER/NAME", help=hub)
        if name == "export-adapter":
            text = "names and shapes of PEFT's modules or of vLLM's"
            command.add_argument("--format", choices=["peft", "vllm"], default="peft", help=text)
        if name in ("export-adapter", "to-gguf"):
            continue
        if name != "from-gguf":
            verify = "compare the result with transformers; needs torch"
            command.add_argument("--verify", action="store_true", help=verify)
        if name != "hf-to-bptjax":
            dtype = "dtype to write. If not set, the dtype of the base model, or, if trained from "
            dtype += "scratch, the dtype of the parameters."
            if name == "from-gguf":
                dtype = "dtype to write. If not set, the file's, or float16 if it is quantized."
            command.add_argument("--dtype", choices=DTYPES, help=dtype)
            size = "largest size of a file"
            command.add_argument("--max_shard_size", default="5GB", help=size)
        if name in ("bptjax-to-hf", "merge-adapter"):
            text = "mxfp4 quantizes the experts of gpt-oss, as OpenAI publishes them"
            command.add_argument("--experts", choices=["mxfp4"], help=text)
    return parser


def configs() -> Parser:
    """Returns the flags of `bptjax configs`."""
    parser = Parser(
        prog="bptjax configs",
        usage="%(prog)s [NAME] [DEST]",
        description="Lists the configs that come with bptjax, or copies one to start from.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="config to copy")
    dest = "new file, or a directory. If not set, the current directory."
    parser.add_argument("dest", nargs="?", metavar="DEST", type=Path, default=Path(), help=dest)
    return parser


def doctor() -> Parser:
    """Returns the flags of `bptjax doctor`."""
    parser = Parser(
        prog="bptjax doctor",
        usage="%(prog)s [--json]",
        description="Shows versions, devices, attention kernels, speed and caches, in less than a "
        "minute, and exits with 0 if training would run on this machine. The output is for bug "
        "reports: it holds no user name, no host name and no secrets.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


PARSERS = {
    "generate": generate,
    "chat": chat,
    "evaluate": evaluate,
    "convert": convert,
    "configs": configs,
    "doctor": doctor,
}
