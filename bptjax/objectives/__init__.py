"""Training objectives, one per file, and their table."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from bptjax.data.chat import FORMATS as CHATS
from bptjax.data.config import DataConfig
from bptjax.data.rows import OTHERS
from bptjax.models.config import ModelConfig
from bptjax.objectives.branches import NextTokenOfBranches
from bptjax.objectives.classes import Classes
from bptjax.objectives.dpo import DPO
from bptjax.objectives.kto import KTO
from bptjax.objectives.masked_tokens import MaskedTokens
from bptjax.objectives.next_token import NextToken
from bptjax.objectives.objective import Objective
from bptjax.objectives.orpo import ORPO
from bptjax.objectives.simpo import SimPO
from bptjax.parsing.flags import nearest

AUTO = "auto"
# `auto` takes the first objective that fits the model.
OBJECTIVES: dict[str, Objective] = {
    row.name: row
    for row in (
        NextToken(),
        MaskedTokens(),
        Classes(),
        DPO(),
        ORPO(),
        SimPO(),
        KTO(),
        NextTokenOfBranches(),
    )
}

RECORDS = {row.record.name: row.record for row in OBJECTIVES.values() if row.record}
# Values of data.format.
FORMATS = AUTO, "text", *CHATS, *RECORDS


@dataclass(frozen=True)
class ObjectiveConfig:
    """What the model is trained to do.

    Attributes:
      type: next_token trains decoders to predict the next token; masked_tokens trains encoders with
        masked_head to predict masked tokens; class trains encoders with classes to predict the
        class of a text or an image. dpo trains decoders on pairs of a better and a worse answer,
        against a reference; orpo and simpo need no reference. kto trains decoders on single answers
        with a label, against a reference. branched trains decoders on
        conversations with several continuations, which share their start. auto takes next_token,
        masked_tokens or class, by the model's head.
      loss: loss of dpo: sigmoid, robust, hinge, ipo, sigmoid_norm or apo_zero.
      beta: factor on log-probabilities in dpo, kto and simpo; larger values keep dpo and kto closer
        to their reference. Weight of the odds ratio in orpo. 0.1; for simpo 2.
      label_smoothing: assumed share of pairs with exchanged answers, for the losses sigmoid, robust
        and sigmoid_norm of dpo.
      sft_weight: weight of the negative log-likelihood of the better answer, per token, in dpo and
        simpo.
      share_prompt: keep one copy of the prompt of a record for both answers, in preference losses.
        The default if all layers have attention, without a pattern. Layers with linear attention or
        short convolutions run twice on the prompt.
      desirable_weight: factor on the losses of good answers in kto. 1.
      undesirable_weight: factor on the losses of bad answers in kto. 1.
      gamma: margin between the answers in simpo.
      reference: source of the reference's log-probabilities. adapters_off runs the model without
        adapters on each batch; cached scores all answers once before training; auto takes the
        former with new adapters, else the latter.
    """

    type: str = AUTO
    loss: str | None = None
    beta: float | None = None
    label_smoothing: float | None = None
    sft_weight: float | None = None
    share_prompt: bool | None = None
    desirable_weight: float | None = None
    undesirable_weight: float | None = None
    gamma: float | None = None
    reference: str | None = None

    def __post_init__(self):
        if self.type not in (names := (AUTO, *OBJECTIVES)):
            raise ValueError(f"objective.type={self.type}: must be one of {', '.join(names)}")
        row = OBJECTIVES.get(self.type)
        known = row.settings() if row else {}
        for key, value in self.given.items():
            if key not in known:
                reading = [name for name, row in OBJECTIVES.items() if key in row.settings()]
                raise ValueError(
                    f"objective.{key}={value}: requires objective.type={' or '.join(reading)}; "
                    "leave it out"
                )
        if row is not None:
            _ = self.of(row)

    @property
    def given(self) -> dict[str, Any]:
        """The keys that are set, other than `type`."""
        names = [f.name for f in fields(self) if f.name != "type"]
        return {name: x for name in names if (x := getattr(self, name)) is not None}

    def of(self, row: Objective) -> Objective:
        """Returns the objective with the values of this config.

        Raises:
          ValueError: a value is out of range.
        """
        known = row.settings()
        return replace(row, **{known[key]: x for key, x in self.given.items() if key in known})


def choose(config: ObjectiveConfig, model: ModelConfig) -> Objective:
    """Returns the objective of a run, with the values of its config keys.

    Raises:
      ValueError: the model has no head for it.
    """
    name = config.type
    if name == AUTO:
        name = next((name for name, row in OBJECTIVES.items() if row.fits(model)), None)
    if name is None:
        raise ValueError("model.causal=false: requires masked_head or classes in model.encoder")
    chosen = config.of(OBJECTIVES[name])
    if not chosen.fits(model):
        raise ValueError(f"objective.type={name}: requires {chosen.needs}")
    return chosen.of_model(model)


def check_formats(data: DataConfig) -> None:
    """Checks the names of record formats, and the names in data.fields.

    Raises:
      ValueError: a name is unknown.
    """
    formats = [("data.format", data.format)]
    formats += [("data.sources: format", each.format) for each in data.sources if each.format]
    for key, value in formats:
        if value not in FORMATS:
            raise ValueError(f"{key}={value}: must be one of {', '.join(FORMATS)}")
    fields = [("data.fields", data, data.fields)]
    fields += [("data.sources: fields", each, each.fields or {}) for each in data.sources]
    for key, own, names in fields:
        format = own.format or data.format
        known = _fields(format, own.text_key or data.text_key)
        for name in names:
            if name not in known:
                hint = nearest(name, known) or f": {', '.join(known)}"
                raise ValueError(
                    f"{key}: {name}: must be a field's name in data.format={format}{hint}"
                )


def _fields(format: str, text_key: str) -> list[str]:
    """Returns the names of the fields that are read from records of a format."""
    chosen = [row for name, row in {**CHATS, **RECORDS}.items() if format in (AUTO, name)]
    names = [name for row in chosen for name in (*row.fields, *row.optional)]
    names += OTHERS if chosen else ()
    names += [text_key, "input_ids", "labels"] * (format not in CHATS)
    return list(dict.fromkeys(names))


def check(
    objective: Objective,
    model: ModelConfig,
    keys: Mapping[str, Any],
    defaults: Mapping[str, Any],
) -> None:
    """Checks the config of a run, `{"group.key": value}`, against its objective.

    Raises:
      ValueError: a key of another objective is set, or a record format or value does not work with
        this objective.
    """
    formats = [("data.format", keys["data.format"])]
    formats += [("data.sources: format", each["format"]) for each in keys["data.sources"]]
    only = objective.record
    for key, value in formats:
        if only is not None and value not in (None, AUTO, only.name):
            text = f"must be {only} with objective.type={objective.name}"
            raise ValueError(f"{key}={value}: {text}; leave it out")
    changed = [(key, value) for key, value in keys.items() if value != defaults[key]]
    for row in OBJECTIVES.values():
        own = [(key, value) for key, value in changed if key in row.keys]
        if row.record and row.record is not objective.record:
            own += [(key, value) for key, value in formats if value == row.record.name]
        for key, value in own if row.name != objective.name else ():
            text = f"requires objective.type={row.name}"
            raise ValueError(f"{key}={value}: {text}; leave it out")
    if (value := keys["data.too_long"]) not in objective.too_long:
        known = " or ".join(objective.too_long)
        raise ValueError(
            f"data.too_long={value}: must be {known} with objective.type={objective.name}"
        )
    objective.check(model, keys)
