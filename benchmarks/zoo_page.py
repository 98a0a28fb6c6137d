"""Writes docs/models.md from the rows of ``benchmarks.zoo``."""

from collections.abc import Sequence
from typing import Any

from benchmarks.zoo_models import ZOO

INTRODUCTION = """# What an audit recovers from well-known models

Each row is the audit of **one step** of a client: one batch of 8 or 32 samples, one gradient in float32, the client in
training mode. The networks are small definitions of our own with the layer sizes of the originals, and with random
weights. The audit knows the model, the batch size and the shape of an input. It does not know the data. One batch per
row is not a statistic: [the results](results/README.md) have many seeds.

    make bench NAME=zoo

The bench writes this page from `docs/results/zoo.json`. The networks are in `benchmarks/zoo_models.py`. *Wrong* counts
claims that are farther than three times their stated error from everything that the layer saw, labels that are wrong,
and named rows of embeddings that the client did not look up.

The columns *preflight* show what [`spearpp preflight`](howto.md#check-a-model-before-any-training) says before any
training: what layers could reveal with the largest batch of its counting bound, and what its simulated client (random
inputs) reveals at this batch size. A bound is not a promise: below it the equations determine the samples, but a search
must find them.
"""
READING = """
## How to read this table

- **inputs**: rows of the training data. **inputs from features**: features were recovered first, and
  [determine the inputs](method.md#features-to-pixels). **features**: what a Linear layer saw, not the data itself.
  **vocabulary**: which [rows of embeddings](method.md#embedding-tables) the training looked up. **labels** are named
  if the audit found the label of every recovered sample.
- Output layers alone give features and labels below half as many samples as classes. Ten classes are therefore too few
  for a batch of 8, and two classes or one output show only one weighted sum of all samples.
- Transformer blocks and MLP-Mixer see every patch of every sample. Their layers are narrower than the number of patches
  of 8 pictures.
- Dropout before a layer hides the input, because its mask is unknown, but the features after the mask are still
  recovered. BatchNorm in training mode mixes the samples of a batch, so nothing after it belongs to one sample.
- The frozen ResNet-18 has random weights, and running statistics of one pass over random pictures. Without such
  statistics all pictures have nearly the same features, which are too similar for a proof.
- A small embedding of which nearly all rows are looked up, as the 80 characters of LEAF's Shakespeare model, gives no
  proof: noise on all rows would look the same.
- "8 of 9 samples" for a batch of 8: the features of fresh deep networks are nearly equal, and the rounding of their
  gradient looks like one more sample, which is not recovered.
- A time budget limits every audit. The times are those of a CPU core that was shared with other work.
"""


def kinds(described: str) -> set[str]:
    """Return the kinds of leaks in a description.

    >>> sorted(kinds("features: 8 of 8 samples; vocabulary: 3 rows of 9"))
    ['features', 'vocabulary']
    """
    return set() if described == "nothing" else {part.partition(":")[0] for part in described.split("; ")}


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the page."""
    heads = [
        "network",
        "b",
        "the audit recovers",
        "wrong",
        "preflight: could reveal",
        "preflight: simulated",
        "seconds",
    ]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        network = ZOO[row["network"]]
        name = f"{network.name} ({network.origin})"
        cells = (row["recovered"], row["wrong"], row["forecast"], row["simulated"], _seconds(row["seconds"]))
        lines.append(f"| {name} | {row['b']} | " + " | ".join(map(str, cells)) + " |")
    same = sum(kinds(row["recovered"]) == kinds(row["simulated"]) for row in rows)
    wrong = sum(row["wrong"] for row in rows)
    budgets = sorted(row["budget"] for row in rows)
    facts = f"{len(rows)} audits with budgets of {budgets[0]:.0f} to {budgets[-1]:.0f} s: {wrong} wrong claims. "
    facts += f"In {same} of them preflight's simulated "
    facts += "client reveals the same kinds of data as the client with real data."
    measured = {row["network"] for row in rows}
    missing = ", ".join(f"{each.name} ({each.origin})" for key, each in ZOO.items() if key not in measured)
    if missing:
        facts += f" Not measured for this table: {missing}. "
        facts += "The page [Pictures through convolutions](results/pixels.md) has results of such networks."
    parts = [INTRODUCTION, facts, "", *lines, READING, _differences(rows), _reasons(rows)]
    return "\n".join(parts)


def _seconds(value: float) -> str:
    """Return seconds with two digits, or as a whole number."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _differences(rows: Sequence[dict[str, Any]]) -> str:
    """Return a list of the rows whose simulated audit gave other kinds of leaks."""
    lines = []
    for row in rows:
        if kinds(row["recovered"]) != kinds(row["simulated"]):
            which = f"{ZOO[row['network']].name}, b = {row['b']}"
            lines.append(f"- {which}: the audit gave {row['recovered']}, the simulated client {row['simulated']}.")
    if not lines:
        return ""
    start = (
        "## Where preflight's simulated client differs\n\nThe simulated client has random inputs, tokens and labels.\n"
    )
    return "\n".join([start, *lines, ""])


def _reasons(rows: Sequence[dict[str, Any]]) -> str:
    """Return the outcome of the layer that each row is about."""
    explained = "Independent directions are candidates for samples. λ is 1 if all candidates agree with the weights."
    lines = [
        "## The outcome in the words of the report",
        "",
        explained,
        "",
        "| network | b | outcome |",
        "|---|---|---|",
    ]
    lines += [f"| {ZOO[row['network']].name} | {row['b']} | {row['why'].replace('|', ' ')} |" for row in rows]
    return "\n".join([*lines, ""])
