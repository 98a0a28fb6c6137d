"""Measures how many rows of an embedding table an audit names, by optimiser and by dtype of the checkpoint.

    make bench NAME=embeddings
    make bench NAME=embeddings ARGS="--seeds 10 --rows sgd adamw"

A client trains a small text classifier for 50 steps on batches of 32 sequences of 20 tokens. The vocabulary has 10,000
tokens, and the tokens follow Zipf's law. Recall is the share of the client's tokens that the audit names. A named token
that the client does not have is wrong.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from benchmarks import command
from spearpp.auditing.vocabulary import audit_vocabulary
from spearpp.model.embeddings import find_tables
from spearpp.types import Tensor
from spearpp.update import ClientUpdate

STEPS, SEQUENCES, LENGTH, VOCABULARY, WIDTH = 50, 32, 20, 10_000, 64
Optimiser = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMISERS: dict[str, Optimiser] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd-decay": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, weight_decay=5e-4),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adam-l2": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=1e-4),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw-strong": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=1.0),
}


class Classifier(nn.Module):
    """Mean of the embeddings of a sequence, one hidden layer, and two classes."""

    def __init__(self, rows: int = VOCABULARY, width: int = WIDTH) -> None:
        super().__init__()
        self.tokens = nn.Embedding(rows, width)
        self.hidden, self.output = nn.Linear(width, 128), nn.Linear(128, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(functional.gelu(self.hidden(self.tokens(x).mean(1))))


@dataclass(frozen=True)
class Row:
    """What the seeds of one setting gave."""

    optimiser: str
    dtype: str
    seeds: int
    tokens: int
    """Number of different tokens of all clients together."""
    moved: int
    """Number of these tokens whose row differs between the two checkpoints. Rounding hides the others."""
    found: int
    wrong: int
    recall: float
    seconds: float
    """Median duration of the audit of the table."""
    reason: str


def client(optimiser: Optimiser, dtype: torch.dtype, seed: int) -> tuple[ClientUpdate, nn.Module, set[int]]:
    """Train one client, and return its update, the model and the tokens of its data."""
    torch.manual_seed(seed)
    model = Classifier()
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(each.to(dtype))
    before = {name: each.clone() for name, each in model.state_dict().items()}
    likely = 1 / torch.arange(1, VOCABULARY + 1).double()
    order, steps = torch.randperm(VOCABULARY), optimiser(list(model.parameters()))
    seen: set[int] = set()
    for _ in range(STEPS):
        tokens = order[torch.multinomial(likely, SEQUENCES * LENGTH, replacement=True)].reshape(SEQUENCES, LENGTH)
        seen |= set(tokens.flatten().tolist())
        steps.zero_grad()
        functional.cross_entropy(model(tokens), torch.randint(0, 2, (SEQUENCES,))).backward()
        steps.step()
    after = {name: each.to(dtype) for name, each in model.state_dict().items()}
    return ClientUpdate.from_weights({n: e.to(dtype) for n, e in before.items()}, after), model, seen


def measure(name: str, dtype: torch.dtype, seeds: int) -> Row:
    """Audit the tables of several clients."""
    tokens = moved = found = wrong = 0
    seconds, reasons = [], []
    for seed in range(seeds):
        update, model, seen = client(OPTIMISERS[name], dtype, seed)
        began = time.perf_counter()
        result = audit_vocabulary(update, find_tables(model, update))[0]
        seconds.append(time.perf_counter() - began)
        changed = update.gradients["tokens.weight"].any(1).nonzero()[:, 0].tolist()
        tokens, moved = tokens + len(seen), moved + len(seen & set(changed))
        found, wrong = found + len(seen & set(result.used)), wrong + len(set(result.used) - seen)
        reasons.append(result.reason)
    label = str(dtype).removeprefix("torch.")
    return Row(name, label, seeds, tokens, moved, found, wrong, found / tokens, statistics.median(seconds), reasons[-1])


def main() -> int:
    """Measure the rows that were asked for."""
    options = command.parser(__doc__)
    options.add_argument("--rows", nargs="+", choices=OPTIMISERS, default=list(OPTIMISERS))
    options.add_argument("--seeds", type=int, default=5, help="number of clients of each row")
    given = options.parse_args()
    torch.set_num_threads(1)
    kinds = itertools.product(given.rows, (torch.float32, torch.bfloat16))
    rows = (measure(name, dtype, given.seeds) for name, dtype in kinds)
    return command.run(command.printed(rows), given.out)


if __name__ == "__main__":
    sys.exit(main())
