"""Audits families of hostile clients and compares every claim with the truth. Fails if a claim is wrong.

    make bench NAME=hostile ARGS="--updates 60 --processes 2"

Every second audit is given the number of the client's samples, as Flower's replies contain it. The benchmark counts,
for every family:

- certified: inputs that the audit reports as one training sample;
- wrong: certified inputs that differ from every sample by more than 1 % of the sample's norm;
- close: inputs that the audit reports as close to a sample, with an error;
- overstated: certified and close inputs whose true error is more than three times the reported error;
- merged: inputs that the audit reports as one sample or a weighted mean of several samples, and for which this is true
  up to 1 % or three times the reported error;
- bad means: inputs with the same report for which it is false;
- inexact means: merged inputs whose true error is more than three times the reported error;
- leaks: updates with the verdict LEAKS;
- wrong leaks: updates with the verdict LEAKS in which no reported input is a sample, up to the reported error or 1 %;
- fits: inputs that the audit reports only as consistent with the update;
- seen: samples that can be recovered: the gradient of the sample is above the rounding of the others, and no other
  sample activates the same neurons;
- missed: seen samples to which no reported input is close;
- crashes: audits that ended with an exception.

A wrong number of samples is a wrong premise of the claim "one sample": with it, an input may also be a mean.
"""

import argparse
import json
import math
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor, nn

import spearpp
from benchmarks import hostile_clients
from benchmarks.hostile_clients import FAMILIES, HostileClient
from spearpp.auditing import LayerAudit
from spearpp.search import Gated

WRONG = 1e-2
"""Relative error above which a certified input is wrong. Design choice."""
CLOSE = 1e-3
"""Relative error up to which a reported input recovers a sample. Design choice: a tenth of ``WRONG``."""
ROUNDING = 1e-6
"""Smallest error that is compared with a reported error.

Derived from float32: the client computes the gradient with a relative rounding of 6e-8 for each operation, so the
truth itself is not known more exactly.
"""
BUDGET = 20.0
"""Seconds for an audit that solves the equations of a network."""
FAULTS = ("wrong", "overstated", "bad means", "inexact means", "wrong leaks", "crashes")
"""Counts that must be zero."""
COLUMNS = (
    *("certified", "wrong", "close", "overstated", "merged", "bad means", "inexact means", "leaks", "wrong leaks"),
    *("fits", "seen", "missed", "crashes"),
)


def distances(recovered: Tensor, truth: Tensor, *, up_to_scale: bool) -> Tensor:
    """Return ‖x - x_j‖ / ‖x_j‖ for every recovered x and every true x_j, as a (recovered, true) matrix.

    A layer without a bias determines its inputs only up to a positive factor. With ``up_to_scale``, all inputs are
    normalised first.
    """
    recovered, truth = recovered.double(), truth.double()
    if up_to_scale:
        recovered, truth = (torch.nn.functional.normalize(each, dim=1) for each in (recovered, truth))
    # A Gram matrix would lose the digits that distinguish 1e-7 from 1e-8.
    apart = torch.stack([torch.linalg.vector_norm(truth - x, dim=1) for x in recovered])
    return apart / torch.linalg.vector_norm(truth, dim=1).clamp_min(1e-300)


def is_weighted_mean(
    x: Tensor, weights: tuple[Tensor, Tensor], client: HostileClient, allowed: float, *, up_to_scale: bool = False
) -> bool:
    """Return whether x is a weighted mean of samples with the same activation pattern, up to an error.

    The weights sum to 1 and are not negative. With one or two outputs, one weight of a pair may be negative.

    Two patterns count as the same if they differ in at most 2 % of the neurons: the mean of samples whose patterns
    differ in a few neurons with small activations is still a mean. Without a ReLU the patterns do not matter.

    Args:
        x: the recovered input, (n,).
        weights: weight and bias of the layer, which give the activation patterns.
        client: the client with its true inputs.
        allowed: largest error, relative to the mean norm of the samples.
        up_to_scale: ignore the norm of x.
    """
    from scipy.optimize import nnls

    group = client.inputs.double()
    if not client.equations:
        patterns = [each @ weights[0].T + weights[1] > 0 for each in (group, x.double())]
        group = group[(patterns[0] != patterns[1]).double().mean(1) <= 0.02]
    if not len(group):
        return False
    size = float(torch.linalg.vector_norm(group, dim=1).mean())
    matrix, wanted = group.T, x.double()
    if up_to_scale:
        wanted = wanted * size / torch.linalg.vector_norm(wanted)
    else:  # one more equation: the weights sum to one
        ones = torch.full((1, len(group)), size, dtype=torch.float64)
        matrix, wanted = torch.cat([matrix, ones]), torch.cat([wanted, ones[:, 0]])
    left_over = float(nnls(matrix.numpy(), wanted.numpy())[1])
    if few_outputs(client) and not up_to_scale:
        left_over = min(left_over, from_lines(x.double(), group))
    return bool(left_over <= allowed * size)


def few_outputs(client: HostileClient) -> bool:
    """Return whether the network has one or two outputs. The signals of its samples are then proportional."""
    outputs = [each.out_features for each in client.model.modules() if isinstance(each, nn.Linear)]
    return bool(outputs) and outputs[-1] <= 2


def from_lines(x: Tensor, group: Tensor) -> float:
    """Return the smallest distance of x from a line through two samples: one of their weights may be negative."""
    first = group[torch.linalg.vector_norm(group - x, dim=1).argmin()]
    along = group - first
    lengths = torch.linalg.vector_norm(along, dim=1, keepdim=True).clamp_min(1e-300)
    along = along / lengths
    off = (x - first) - (along @ (x - first))[:, None] * along
    return float(torch.linalg.vector_norm(off, dim=1).amin())


def told_apart(client: HostileClient) -> Tensor:
    """Return which samples can be recovered.

    The gradient of such a sample is above 1e-4 of the largest one, a thousand times the rounding of float32, and the
    activation patterns of all other samples differ from its own in more than one neuron.
    """
    strength = torch.linalg.vector_norm(client.signals.double(), dim=1)
    strength = strength * torch.linalg.vector_norm(client.inputs.double(), dim=1).clamp_min(1e-12)
    same = (client.fires[:, None] != client.fires[None]).sum(2) <= 1
    same.fill_diagonal_(False)
    if client.equations:
        same = torch.zeros_like(same)
    return (strength > 1e-4 * strength.max()) & ~same.any(1)


def judged(client: HostileClient, *, told: bool, starts: int = 2048, budget: float = BUDGET) -> Counter[str]:
    """Audit one client and compare its claims with the truth.

    Args:
        client: the client.
        told: whether the audit is given the number of samples.
        starts: number of starts of the search.
        budget: seconds for an audit that solves the equations of a network.

    Returns:
        The counts that the module describes.
    """
    counts: Counter[str] = Counter(updates=1, samples=len(client.inputs))
    result = spearpp.audit(
        client.update,
        client.model if client.pass_model else None,
        search=None if client.equations else Gated(starts=starts),
        batch_size=(client.said or client.samples) if told else None,
        budget=budget if client.equations else None,
    )
    counts["leaks"] = int(result.verdict == "LEAKS")
    visible = told_apart(client)
    counts["seen"] = int(visible.sum())
    audited = next((each for each in result.layers if each.layer.name == client.layer), None)
    inversion = None if audited is None else audited.inversion
    if audited is None or inversion is None or not len(inversion.inputs):
        counts["missed"] = counts["seen"]
        counts["wrong leaks"] = counts["leaks"] if result.best is audited else 0
        return counts
    apart = distances(inversion.inputs, client.inputs, up_to_scale=not inversion.scale_known)
    nearest = apart.amin(1)
    one, mean, close, claimed, fits, error = claims(audited)
    if told and client.said not in (0, client.samples):
        one, mean = torch.zeros_like(one), mean | one
    bound = (3 * error).clamp_min(ROUNDING)
    counts["certified"] = int(one.sum())
    counts["wrong"] = int((one & (nearest > WRONG)).sum())
    counts["close"] = int(close.sum())
    counts["overstated"] = int(((one | (close & ~mean)) & (nearest > bound)).sum())
    weight = client.update.weights[audited.layer.weight].double()
    bias = torch.zeros(len(weight), dtype=torch.float64)
    if audited.layer.bias is not None:
        bias = client.update.weights[audited.layer.bias].double()
    for row in mean.nonzero()[:, 0].tolist():

        def within(allowed: float, row: int = row) -> bool:
            return bool(nearest[row] <= allowed) or is_weighted_mean(
                inversion.inputs[row], (weight, bias), client, allowed, up_to_scale=not inversion.scale_known
            )

        right = within(max(WRONG, float(bound[row])))
        counts["merged" if right else "bad means"] += 1
        counts["inexact means"] += int(right and not within(float(bound[row])))
    if counts["leaks"] and result.best is audited:
        reported = claimed | fits
        good = (nearest <= WRONG) | (nearest <= bound)
        counts["wrong leaks"] = int(not bool((reported & good).any()))
    counts["fits"] = int((fits & ~claimed).sum())
    recovered = (apart[claimed | fits] <= CLOSE).any(0) if bool((claimed | fits).any()) else torch.zeros_like(visible)
    counts["missed"] = int((visible & ~recovered).sum())
    return counts


def claims(audited: LayerAudit) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what the audit reports about each input.

    Returns:
        Five masks over the inputs (one sample; one sample or a mean; approximate; recovered; fits only) and the
        reported errors.
    """
    found = audited.claims
    kinds = [str(each.kind) for each in found]
    one = torch.tensor([kind == "one sample" for kind in kinds])
    open_end = [
        kind == "approximate" and not math.isfinite(each.apart) for kind, each in zip(kinds, found, strict=True)
    ]
    mean = torch.tensor([kind == "one sample or a mean" for kind in kinds]) | torch.tensor(open_end)
    recovered = torch.tensor([each.recovered for each in found])
    fits = torch.tensor([kind in ("several samples", "fits") for kind in kinds])
    error = torch.tensor([each.error for each in found], dtype=torch.float64)
    return one, mean, torch.tensor([kind == "approximate" for kind in kinds]), recovered, fits, error


def seed_of(name: str, seed: int) -> int:
    """Return the seed of one update of a family. Families do not share seeds."""
    return 1_000_003 * (list(FAMILIES).index(name) + 1) + seed


def run(task: tuple[str, int, str | None]) -> tuple[str, int, Counter[str], float]:
    """Audit one update of a family, and return its counts and its duration in seconds."""
    name, seed, tables = task
    torch.set_num_threads(1)
    if tables and not hostile_clients.TABLES:
        hostile_clients.use_tables(tables)
    generator = torch.Generator().manual_seed(seed_of(name, seed))
    began = time.monotonic()
    client = FAMILIES[name](generator)
    try:
        counts = judged(client, told=seed % 2 == 0)
    except Exception:
        traceback.print_exc()
        counts = Counter(updates=1, samples=len(client.inputs), crashes=1)
    return name, seed, counts, time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=60, help="number of updates of each family")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--families", nargs="*", help="audit only families whose name contains one of these words")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tables", help="npz file with the data sets, for machines without scikit-learn")
    parser.add_argument("--save-tables", help="write the file for --tables and stop")
    parser.add_argument("--out", help="write the counts, and every update with a wrong claim, as JSON")
    options = parser.parse_args()
    if options.save_tables:
        hostile_clients.save_tables(options.save_tables)
        return 0
    chosen = [n for n in FAMILIES if not options.families or any(word in n for word in options.families)]
    seeds = range(options.first, options.first + options.updates)
    tasks = [(name, seed, options.tables) for seed in seeds for name in chosen]
    sums = {name: Counter[str]() for name in chosen}
    faults: list[tuple[str, int, dict[str, int]]] = []
    done = 0
    with ProcessPoolExecutor(options.processes) as pool, suppress(KeyboardInterrupt):
        for name, seed, counts, seconds in pool.map(run, tasks, chunksize=4):
            done += 1
            sums[name].update(counts)
            sums[name]["milliseconds"] += round(1000 * seconds)
            if any(counts[each] for each in FAULTS):
                faults.append((name, seed, dict(counts)))
                print(f"fault: {name}, seed {seed}: {dict(counts)}", file=sys.stderr, flush=True)
            if done % 100 == 0:
                print(f"{done} of {len(tasks)} updates, {len(faults)} with a wrong claim", file=sys.stderr, flush=True)
    print(f"{'family':<52}{'updates':>8}" + "".join(f"{each:>12}" for each in COLUMNS) + f"{'s each':>8}")
    total: Counter[str] = sum(sums.values(), Counter())
    for name, counts in [*sums.items(), ("all", total)]:
        each = counts["milliseconds"] / 1000 / max(1, counts["updates"])
        print(f"{name:<52}{counts['updates']:>8}" + "".join(f"{counts[c]:>12}" for c in COLUMNS) + f"{each:>8.2f}")
    if options.out:
        with open(options.out, "w") as file:
            json.dump({"sums": sums, "faults": faults}, file, indent=1)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
