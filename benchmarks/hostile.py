"""Is a certificate ever wrong? Audits families of hostile clients and compares every claim with the truth.

    make bench NAME=hostile ARGS="--updates 60 --processes 2"

Every other update comes with the number of the client's samples, as Flower's replies do. For every family it counts:

- certified: inputs that the audit calls one training sample;
- wrong: of these, the ones more than 1 % away from every sample (relative to the sample's norm);
- close: inputs that the audit calls close to a sample, with a stated error;
- overstated: certified and close ones whose true error is more than three times the stated one;
- merged: inputs that the audit calls one sample or a weighted mean of several, and that are one of the two, up to 1 %
  or three times the stated error;
- bad means: inputs with that status that are neither;
- inexact means: of the merged ones, those that are off by more than three times the stated error;
- leaks: updates with the verdict LEAKS; wrong leaks: those in which no reported input is a sample, up to the
  stated error or 1 %;
- seen: samples that the gradient tells apart (their own activation pattern or signal, above the noise);
- missed: of these, the ones that no reported input is close to.
"""

import argparse
import json
import math
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

import spearpp
from benchmarks import hostile_clients
from benchmarks.hostile_clients import FAMILIES, HostileClient
from spearpp.auditing import LayerAudit
from spearpp.search import Gated

WRONG = 1e-2
CLOSE = 1e-3
ROUNDING = 1e-6
"""Errors below this are the rounding of what the client computed, not of what was recovered."""
FAULTS = ("wrong", "overstated", "bad means", "inexact means", "wrong leaks")
COLUMNS = (
    "certified",
    "wrong",
    "close",
    "overstated",
    "merged",
    "bad means",
    "inexact means",
    "leaks",
    "wrong leaks",
    "fits",
    "seen",
    "missed",
)


def distances(recovered: Tensor, truth: Tensor, *, up_to_scale: bool) -> Tensor:
    """‖x - x_j‖ / ‖x_j‖ for every recovered x and true x_j; up to a positive factor for layers without a bias."""
    recovered, truth = recovered.double(), truth.double()
    if up_to_scale:
        recovered, truth = (torch.nn.functional.normalize(each, dim=1) for each in (recovered, truth))
    # Not by a Gram matrix: it loses the digits that tell 1e-7 from 1e-8.
    apart = torch.stack([torch.linalg.vector_norm(truth - x, dim=1) for x in recovered])
    return apart / torch.linalg.vector_norm(truth, dim=1).clamp_min(1e-300)


def is_weighted_mean(
    x: Tensor, fires: Tensor, client: HostileClient, allowed: float, *, up_to_scale: bool = False
) -> bool:
    """Whether x is a convex combination of samples with one activation pattern, up to an error.

    Samples count as having one pattern if they differ in at most 2 % of the neurons: a mean of samples whose
    patterns differ in a few neurons that hardly fire is still a mean.
    """
    from scipy.optimize import nnls

    near = (client.fires != fires).double().mean(1) <= 0.02
    group = client.inputs[near].double()
    if not len(group):
        return False
    size = float(torch.linalg.vector_norm(group, dim=1).mean())
    matrix, wanted = group.T, x.double()
    if up_to_scale:
        wanted = wanted * size / torch.linalg.vector_norm(wanted)
    else:  # the weights add up to one
        ones = torch.full((1, len(group)), size, dtype=torch.float64)
        matrix, wanted = torch.cat([matrix, ones]), torch.cat([wanted, ones[:, 0]])
    _, left_over = nnls(matrix.numpy(), wanted.numpy())
    return bool(left_over <= allowed * size)


def told_apart(client: HostileClient) -> Tensor:
    """Samples whose own part of the gradient stands above rounding and that share no pattern with another."""
    strength = torch.linalg.vector_norm(client.signals.double(), dim=1)
    strength = strength * torch.linalg.vector_norm(client.inputs.double(), dim=1).clamp_min(1e-12)
    same = (client.fires[:, None] != client.fires[None]).sum(2) <= 1
    same.fill_diagonal_(False)
    return (strength > 1e-4 * strength.max()) & ~same.any(1)


def judged(client: HostileClient, *, told: bool, starts: int = 2048) -> Counter[str]:
    """Audit one client, told how many samples it has or not, and compare what is claimed with the truth."""
    counts: Counter[str] = Counter(updates=1, samples=len(client.inputs))
    result = spearpp.audit(
        client.update,
        client.model if client.pass_model else None,
        search=Gated(starts=starts),
        batch_size=client.samples if told else None,
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
        x = inversion.inputs[row]
        fires = weight @ x.double() + bias > 0

        def within(allowed: float, x: Tensor = x, fires: Tensor = fires, row: int = row) -> bool:
            return bool(nearest[row] <= allowed) or is_weighted_mean(
                x, fires, client, allowed, up_to_scale=not inversion.scale_known
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
    """What is said of each row: one; one or a mean; approximate; recovered; fits only; stated error."""
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
    """The seed of one update of a family: no two families share their random numbers."""
    return 1_000_003 * (list(FAMILIES).index(name) + 1) + seed


def run(task: tuple[str, int, str | None]) -> tuple[str, int, Counter[str], float]:
    """One update of a family."""
    name, seed, tables = task
    torch.set_num_threads(1)
    if tables and not hostile_clients.TABLES:
        hostile_clients.use_tables(tables)
    generator = torch.Generator().manual_seed(seed_of(name, seed))
    began = time.monotonic()
    counts = judged(FAMILIES[name](generator), told=seed % 2 == 0)
    return name, seed, counts, time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=60, help="updates of each family")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--families", nargs="*", help="only families whose name contains one of these words")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tables", help="npz file with the data sets, for machines without scikit-learn")
    parser.add_argument("--save-tables", help="write that file and stop")
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
    for name, seed, found in faults[:40]:
        print(f"fault: {name}, seed {seed}: {found}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
