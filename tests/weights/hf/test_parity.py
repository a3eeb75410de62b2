"""Every family computes what transformers computes: hidden states, logits, loss, gradients. The
largest differences are properties of the tests, for scripts/parity.py."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.comparing import quick
from tiers import fast

from bptjax.models.execution import Execution
from bptjax.models.feed_forwards import FEED_FORWARDS
from bptjax.models.params import param_path
from bptjax.objectives.masked_tokens import MaskedTokens
from bptjax.ops.loss import linear_cross_entropy
from bptjax.weights.hf.config import read_config
from weights.hf.cases import CASES, ENCODERS, FAMILIES
from weights.hf.loading import load

# Relative to the largest value.
TOLERANCE = 1e-5
SCAN = Execution(attention_implementation="scan", q_chunk=8, k_chunk=8, ffn_chunk=10)
FUSED = Execution(attention_implementation="scan", schedule="fused", q_chunk=8, k_chunk=16)
# Names in the file and in transformers' modules, where they differ.
RENAMED = (
    (r"embed_out", "lm_head"),
    (r"block_sparse_moe", "mlp"),
    (r"experts\.(\d+)\.w1", r"experts.\1.gate_proj"),
    (r"experts\.(\d+)\.w2", r"experts.\1.down_proj"),
    (r"experts\.(\d+)\.w3", r"experts.\1.up_proj"),
    (r"(vit\.)encoder\.layer", r"\1layers"),
    (r"attention\.attention\.(.)\w+", r"attention.\1_proj"),
    (r"(vit\.layers.*)attention\.output\.dense", r"\1attention.o_proj"),
    (r"(vit\.layers.*)intermediate\.dense", r"\1mlp.fc1"),
    (r"(vit\.layers.*\d)\.output\.dense", r"\1.mlp.fc2"),
)


def error(got, wanted):
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert got.shape == wanted.shape
    return np.abs(got - wanted).max() / max(np.abs(wanted).max(), 1e-30)


# Their structure is that of another family of the fast tier, or the test of gradients has them.
REPEATED = (
    *("gemma4 with experts", "gemma4_text", "gemma4_unified_text", "gemma4_unified"),
    *("qwen3_5_text", "qwen3_5_moe", "qwen3_vl", "mistral", "mixtral", "gpt_neox", "bloom"),
)
FAST = {*FAMILIES.values(), "falcon: ALiBi, sequential"} - {FAMILIES[name] for name in REPEATED}


@pytest.mark.parametrize("name", fast(CASES, FAST))
def test_hidden_states_and_logits(theirs, tokens, name, record_property):
    torch = pytest.importorskip("torch")
    model, directory = theirs(name)
    with torch.no_grad():
        out = model(torch.tensor(tokens), output_hidden_states=True)
    wanted = [x.numpy() for x in (*out.hidden_states, out.logits)]
    decoder = load(directory)

    @quick
    def run(decoder):
        # Theirs has the last layer's output after the final norm and projection only.
        *states, _, last = decoder.hidden_states(jnp.asarray(tokens), execution=FUSED)
        return [*states, last, decoder.logits(last)]

    errors = [error(a, b) for a, b in zip(run(decoder), wanted, strict=True)]
    assert max(errors) < TOLERANCE, errors
    record_property("hidden", float(max(errors)))


@pytest.mark.parametrize("name", fast(FAMILIES.values(), ["mixtral", "gpt_neox", "bloom"]))
def test_loss_and_gradients(theirs, tokens, name, record_property):
    torch = pytest.importorskip("torch")
    model, directory = theirs(name)
    model.zero_grad()
    loss = model(torch.tensor(tokens), labels=torch.tensor(tokens)).loss
    loss.backward()
    wanted = {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
    wanted = dict(each_expert(wanted))
    decoder = load(directory)

    @quick
    @jax.value_and_grad
    def ours(decoder):
        labels = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-100)
        hidden, sums = decoder(jnp.asarray(tokens), execution=SCAN)
        hidden, config = decoder.for_head(hidden), decoder.config
        total = linear_cross_entropy(
            hidden,
            decoder.head_matrix,
            labels,
            bias=decoder.logits_bias,
            softcap=config.logits_softcap,
            chunk=8,
        )
        loss, network = (
            total / (labels != -100).sum().astype(jnp.float32),
            FEED_FORWARDS[config.feed_forward],
        )
        if network.has_auxiliary_loss(config):
            loss += network.auxiliary_loss(config, sums, sums, jnp.float32(tokens.size))
        return loss

    compare_learning(ours(decoder), loss.item(), wanted, directory, record_property)


def each_expert(gradients):
    """Yields the experts' gradients by names of a tensor each, as the files have them."""
    for name, gradient in gradients.items():
        prefix, fused, suffix = name.partition(".experts.")
        together = prefix + ".experts.down_proj_bias" in gradients or not prefix.endswith("mlp")
        if not fused or together:
            yield name, gradient
            continue
        for expert, matrix in enumerate(gradient):
            parts = {suffix: matrix}
            if suffix == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), np.split(matrix, 2), strict=True))
            for part, x in parts.items():
                yield f"{prefix}.experts.{expert}.{part}.weight", x


def compare_learning(ours, loss, wanted, directory, record_property):
    """The loss, and the gradient of every parameter by its name in the file."""
    value, gradients = ours
    apart, worst = abs(float(value) - loss) / loss, 0.0
    assert apart < 1e-5
    flat = {
        param_path(path).removesuffix(".value"): np.asarray(x)
        for path, x in jax.tree.leaves_with_path(gradients)
    }
    family, config = read_config(directory)
    largest = max(np.abs(g).max() for g in wanted.values())
    for rule, names in family.names(config).items():
        for index, tensor in names.items():
            for old, new in RENAMED:
                tensor = re.sub(old, new, tensor)
            parts = [flat[path][index] for path in rule.ours]
            got = rule.join(*parts)
            if tensor.endswith(("e_score_correction_bias", "layer_scalar")):
                assert not got.any()  # Not trained.
                continue
            true = wanted.pop(tensor)
            # Some gradients are 0 but for rounding: they are held to the largest one.
            size = max(np.abs(true).max(), 1e-3 * largest)
            difference = np.abs(got - true).max() / size
            assert difference < 1e-4, tensor
            worst = max(worst, difference)
    assert not wanted
    record_property("loss", apart)
    record_property("gradients", float(worst))


def encoder_inputs(config, tokens):
    if config.encoder.image_size is None:
        return tokens, "input_ids"
    shape = 2, config.encoder.channels, *config.encoder.image_size
    return np.random.default_rng(0).normal(size=shape).astype(np.float32), "pixel_values"


@pytest.mark.parametrize("name", fast(ENCODERS, lambda name: ":" not in name))
def test_encoders(theirs, tokens, name, record_property):
    torch = pytest.importorskip("torch")
    model, directory = theirs(name)
    encoder = load(directory)
    inputs, key = encoder_inputs(encoder.config, tokens)
    with torch.no_grad():
        out = model(**{key: torch.tensor(inputs)}, output_hidden_states=True)
    headless = encoder.config.encoder.pooler and not encoder.config.encoder.classes
    wanted = [*out.hidden_states, out.pooler_output if headless else out.logits]

    @quick
    def run(encoder):
        *states, last = encoder.hidden_states(jnp.asarray(inputs), execution=FUSED)
        if encoder.config.encoder.image_size is None:
            # Theirs has the last state of text after the final norm only.
            states[-1] = last
        return [*states, encoder.pooled(last) if headless else encoder.logits(last)], last

    got, last = run(encoder)
    errors = [error(a, b) for a, b in zip(got, wanted, strict=True)]
    assert max(errors) < TOLERANCE, errors
    if headless:
        assert error(last, out.last_hidden_state) < TOLERANCE
    record_property("hidden", float(max(errors)))


def test_padding_is_not_seen_by_an_encoder(theirs, tokens):
    torch = pytest.importorskip("torch")
    model, directory = theirs("bert")
    mask = np.ones_like(tokens)
    mask[0, 15:] = 0
    types = (np.arange(21) > 9).astype(np.int32)[None].repeat(2, 0)
    with torch.no_grad():
        wanted = model(
            torch.tensor(tokens),
            attention_mask=torch.tensor(mask),
            token_type_ids=torch.tensor(types),
        ).logits
    encoder = load(directory)

    @quick
    def run(encoder, **inputs):
        return encoder.logits(encoder(**inputs)[0])

    got = np.asarray(run(encoder, tokens=tokens, segments=mask, token_types=types))
    assert error(got[mask > 0], wanted.numpy()[mask > 0]) < TOLERANCE


def test_padding_is_not_in_the_mean(theirs, tokens):
    torch = pytest.importorskip("torch")
    model, directory = theirs("modernbert: classes of the mean")
    mask = np.ones_like(tokens)
    mask[0, 15:] = 0
    with torch.no_grad():
        wanted = model(torch.tensor(tokens), attention_mask=torch.tensor(mask)).logits

    @quick
    def run(encoder, tokens, segments):
        hidden, _ = encoder(tokens, segments=segments)
        return encoder.logits(hidden, segments), encoder.logits(hidden)

    without, within = run(load(directory), tokens, mask)
    assert error(without, wanted) < TOLERANCE
    assert error(within, wanted) > 1e-3


LEARNERS = ["bert", "roberta", "modernbert", "vit"]
LEARNERS += [f"{name}: classes" for name in ("bert", "roberta", "modernbert")]
LEARNERS += ["modernbert: classes of the mean"]


@pytest.mark.parametrize("name", fast(LEARNERS, ["bert"]))
def test_encoders_learn_the_same(theirs, tokens, name, record_property):
    torch = pytest.importorskip("torch")
    model, directory = theirs(name)
    encoder = load(directory)
    inputs, key = encoder_inputs(encoder.config, tokens)
    labels = np.array([0, 1])
    if MaskedTokens().fits(encoder.config):
        labels = np.where(np.arange(tokens.shape[1]) % 5 == 2, tokens, -100)
    # The first token has the label of a document or an image.
    first, T = (
        labels,
        encoder.config.encoder.patches + 1
        if encoder.config.encoder.image_size
        else tokens.shape[1],
    )
    if labels.ndim == 1:
        first = np.where(np.arange(T) == 0, labels[:, None], -100)
    model.zero_grad()
    loss = model(**{key: torch.tensor(inputs)}, labels=torch.tensor(labels)).loss
    loss.backward()
    wanted = {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}

    @quick
    @jax.value_and_grad
    def ours(encoder):
        hidden, _ = encoder(jnp.asarray(inputs), execution=SCAN)
        total = linear_cross_entropy(
            encoder.for_head(encoder.pool(hidden, None)),
            encoder.head_matrix,
            first,
            bias=encoder.logits_bias,
            chunk=8,
        )
        return total / float((first != -100).sum())

    compare_learning(ours(encoder), loss.item(), wanted, directory, record_property)
