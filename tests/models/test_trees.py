"""A row that holds a tree of tokens is its branches as separate rows: outputs, gradients, and no
token of one answer in another."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.test_decoder import MODELS, ROTARY
from ops.comparing import close, quick

from bptjax.data.examples import sequence
from bptjax.data.trees import tree
from bptjax.models.decoder import Decoder
from bptjax.models.execution import Execution
from bptjax.models.stack import check_trees
from bptjax.ops.labels import IGNORED

RNG = np.random.default_rng(0)
T = 40


def row(prompt, answer):
    """The example of a prompt and its answer: each token predicts the next one."""
    ids = np.concatenate([prompt, answer]).astype(np.int32)
    labels = np.where(np.arange(len(ids)) < len(prompt), IGNORED, ids).astype(np.int32)
    return {"tokens": ids[:-1], "labels": labels[1:]}


def draw(n):
    return RNG.integers(1, 61, n)


PROMPT, LATER = draw(9), draw(4)
# Three answers, two of which begin alike, and a record of its own.
ANSWERS = draw(5), np.concatenate([LATER, [1, 2]]), np.concatenate([LATER, [3]])
ROWS = [row(PROMPT, answer) for answer in ANSWERS]
DOCUMENT = tree([row(draw(3), draw(5))])
PACKED = {name: x[None] for name, x in sequence([tree(ROWS), DOCUMENT], T).items()}
WINDOW = replace(ROTARY, sliding_window=4, layer_types=["sliding_attention", "full_attention"])
OTHERS = "alibi", "learned", "full heads, shared keys, layers' embeddings"
CONFIGS = {"window": WINDOW} | {name: MODELS[name] for name in ("rotary", *OTHERS)}


def test_layout():
    """The last token of the prompt begins each answer; no label is lost."""
    own = tree(ROWS)
    assert own["tokens"][:8].tolist() == PROMPT[:-1].tolist()
    assert (own["tokens"][own["positions"] == 8] == PROMPT[-1]).all()
    assert own["ends"][0] == len(own["tokens"]) and own["leaves"][0] == 3
    # LATER is shared but for its last token, whose label differs.
    assert len(own["tokens"]) == 8 + 5 + (1 + 3) + 2 + 1
    assert (own["leaves"] * (own["labels"] != IGNORED)).sum() == sum(map(len, ANSWERS))
    start = len(own["tokens"])
    assert (
        PACKED["ends"][0, start] == start + len(DOCUMENT["tokens"]) and PACKED["ends"][0, -1] == 0
    )


def where(number):
    """Indices in `PACKED` of the tokens of a row: its last token and all that see it."""
    leaf = np.flatnonzero(PACKED["labels"][0] == ROWS[number]["labels"][-1])
    depth = PACKED["positions"][0][leaf] == len(ROWS[number]["tokens"]) - 1
    (leaf,) = leaf[depth & (PACKED["segments"][0][leaf] == 1)]
    ends = PACKED["ends"][0]
    return np.flatnonzero((np.arange(T) <= leaf) & (leaf < ends))


def model_of(name):
    return Decoder(CONFIGS[name], jax.random.key(0))


def hidden(model, execution=Execution(), **batch):  # noqa: B008
    return model(**batch, execution=execution)[0]


def inputs(batch):
    names = "tokens", "positions", "segments", "ends"
    return {name: jnp.asarray(batch[name]) for name in names if name in batch}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name, schedule",
    # Every other layer of "window" is like the layers of "rotary".
    [*((name, "split") for name in ("window", *OTHERS)), ("window", "fused")],
)
def test_a_tree_is_its_separate_rows(name, schedule):
    """Hidden states, and the gradients of a sum over the leaves."""
    model = model_of(name)
    execution = Execution(schedule=schedule, q_chunk=8, k_chunk=8, ffn_chunk=16)
    weights = RNG.normal(size=model.config.E).astype(np.float32)

    def together(model):
        out = hidden(model, execution, **inputs(PACKED))
        parts = [out[0, where(i)] for i in range(3)]
        return sum((x @ weights).sum() for x in parts), parts

    def apart(model):
        parts = [hidden(model, tokens=own["tokens"][None])[0] for own in ROWS]
        return sum((x @ weights).sum() for x in parts), parts

    (gradients, parts), (wanted, own) = (
        quick(jax.grad(f, has_aux=True))(model) for f in (together, apart)
    )
    close(parts, own, scale=3.0)
    close(gradients, wanted, scale=3.0)


def test_answers_do_not_see_each_other():
    """Another token in one answer moves no bit of the others."""
    model, at = model_of("window"), where(0)[-1]
    changed = dict(PACKED, tokens=PACKED["tokens"].copy())
    changed["tokens"][0, at - 2] += 1
    f = quick(hidden)
    a, b = (np.asarray(f(model, **inputs(batch)))[0] for batch in (PACKED, changed))
    moved = (a != b).any(-1)
    assert moved[at - 2 : at + 1].all() and moved.sum() == 3


MIXERS = "linear attention, gate", "short convolution"


@pytest.mark.thorough
@pytest.mark.parametrize("name", MIXERS)
def test_two_branches_of_layers_with_a_state(name):
    """Trees of two branches are their separate rows, packed with a document; trees of three give
    NaN, and leave other sequences as they are."""
    model = Decoder(MODELS[name], jax.random.key(0))
    trees = [tree(ROWS[:2]), DOCUMENT, tree(ROWS[1:][::-1])]
    batch = {name: x[None] for name, x in sequence(trees, 2 * T).items()}
    weights = RNG.normal(size=model.config.E).astype(np.float32)
    ids, ends, labels = batch["tokens"][0], batch["ends"][0], batch["labels"][0]
    leaves = [i for i in range(2 * T) if ends[i] == i + 1]
    paths = [np.flatnonzero((np.arange(2 * T) <= i) & (i < ends)) for i in leaves]
    assert len(paths) == 5 and (labels[leaves] != IGNORED).all()

    def together(model):
        out = hidden(model, **inputs(batch))
        parts = [out[0, path] for path in paths]
        return sum((x @ weights).sum() for x in parts), parts

    def apart(model):
        parts = [hidden(model, tokens=jnp.asarray(ids[path])[None])[0] for path in paths]
        return sum((x @ weights).sum() for x in parts), parts

    (gradients, parts), (wanted, own) = (
        quick(jax.grad(f, has_aux=True))(model) for f in (together, apart)
    )
    close(parts, own, scale=3.0)
    close(gradients, wanted, scale=3.0)
    both = jax.tree.map(lambda x, y: np.concatenate([x[:, :T], y]), batch, PACKED)
    out = np.asarray(quick(hidden)(model, **inputs(both)))
    assert np.isfinite(out[0]).all() and np.isnan(out[1]).all()


def test_refusals():
    for name in MIXERS:
        with pytest.raises(NotImplementedError, match="layers of .* of at most two branches"):
            check_trees(MODELS[name], two=False)
    with pytest.raises(ValueError, match="ends: requires positions"):
        jax.eval_shape(hidden, model_of("rotary"), tokens=PACKED["tokens"], ends=PACKED["ends"])
