"""Counts the passes of a run over texts and chats in one pool, and prints a row for each case.

    python scripts/passes.py > scripts/results/passes.json

A case is a packing, a share of chats, a sequence length and a number of shards. The rows give the
mean passes over the tokens of the texts and of the chats, the fewest and most passes over a record,
and the share of padding. Needs no device.
"""

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np

from bptjax.data.config import DataConfig
from bptjax.data.loader import data_check, train_loader
from bptjax.data.packing import PACKINGS
from bptjax.data.rows import TokenIds

RECORDS, EPOCHS = 300, 2
SHARES, LENGTHS, SHARDS = (0.02, 0.15, 0.5), (1024, 4096), (1, 3)
GROUPED = "none, group_by_length"
TOKENIZER = SimpleNamespace(vocab_size=RECORDS, eos_id=None)


def pool(share: float) -> list[np.ndarray | TokenIds]:
    """Returns texts of up to 3,000 tokens and chats of up to 900. Each token of a record is the
    number of the record."""
    rng, chats, found = np.random.default_rng(0), round(share * RECORDS), []
    for number, masked in enumerate(rng.permutation(RECORDS) < chats):
        ids = np.full(int(rng.integers(50, 900 if masked else 3000)), number, np.int32)
        labels = np.where(np.arange(len(ids)) < 20, -100, ids)
        found.append(TokenIds(ids, labels) if masked else ids)
    return found


def case(packing: str, share: float, seq_len: int, shards: int) -> dict[str, object]:
    records, grouped = pool(share), packing == GROUPED
    how: dict[str, Any] = dict(packing="none" if grouped else packing, group_by_length=grouped)
    config = DataConfig(num_shards=shards, **how)
    check = data_check(records, [], TOKENIZER, config, seq_len=seq_len)
    check.run(math.inf)
    limits = check.limits(EPOCHS, shards)
    steps = max(limit.sequences for limit in limits)
    loader = train_loader(records, TOKENIZER, config, seq_len=seq_len, batch_size=shards)
    loader.limit(limits, steps)
    counts, size, chats = np.zeros(RECORDS, int), 0, [isinstance(x, TokenIds) for x in records]
    for _ in range(steps):
        batch = next(loader)
        counts += np.bincount(batch["tokens"][batch["segments"] > 0], minlength=RECORDS)
        size += batch["tokens"].size
    loader.close()
    # The last token is only a label.
    lengths = np.array([len(one) - 1 for one in records])
    passes, masked = counts / lengths, np.array(chats)
    row = dict(packing=packing, share=share, seq_len=seq_len, shards=shards, epochs=EPOCHS)
    return row | dict(
        texts=counts[~masked].sum() / lengths[~masked].sum(),
        chats=counts[masked].sum() / lengths[masked].sum(),
        fewest=passes.min(),
        most=passes.max(),
        padding=1 - counts.sum() / size,
    )


def main() -> None:
    rows = [
        case(packing, share, seq_len, shards)
        for packing in (*PACKINGS, GROUPED)
        for seq_len in LENGTHS
        for shards in SHARDS
        for share in SHARES
        if packing != GROUPED or shards == 1
    ]
    print("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]")


if __name__ == "__main__":
    main()
