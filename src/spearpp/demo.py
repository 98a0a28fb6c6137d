"""A client trains one step on photographs; the server gets them back. Run by ``make demo``."""

import argparse
import sys
from pathlib import Path

import numpy
import torch

from spearpp import simulate
from spearpp.errors import MissingExtraError, SpearError
from spearpp.invert import invert
from spearpp.metrics import Score, score
from spearpp.result import Inversion, Progress
from spearpp.search import Gated
from spearpp.shapes import Float, Tensor
from spearpp.simulate import Batch

WIDTH = 200
PER_LINE = 16


def main(arguments: list[str] | None = None) -> int:
    """Simulate, invert, print, draw. Exit code 0: every input came back; 1: not every one; 2: an error."""
    parser = argparse.ArgumentParser(prog="python -m spearpp.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the picture (default: demo)")
    parser.add_argument("--samples", type=int, default=32, help="batch size (default: 32)")
    parser.add_argument("--starts", type=int, default=16_384, help="starts at most (default: 16384)")
    parser.add_argument("--seed", type=int, default=0, help="for data, network and search (default: 0)")
    options = parser.parse_args(arguments)
    try:
        return run(options)
    except (SpearError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    """The demo itself."""
    options.out.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(options.seed)
    batch = simulate.photographs(options.samples, generator=generator)
    model = simulate.mlp(batch.inputs.shape[1], [WIDTH] * 3, 10, generator=generator)
    print(
        f"A client takes one training step on {options.samples} photographs (32 x 32 colour pixels), with a fresh "
        f"network of three hidden ReLU layers of {WIDTH}.\n"
        "The server sees the gradient of the first layer, nothing else."
    )
    seen = simulate.fedsgd(model, batch)[0]
    result = invert(*seen, search=Gated(starts=options.starts), generator=generator, progress=_show)
    _show_end()
    compared = score(result.inputs, batch.inputs, normalisation=batch.normalisation)
    _print_result(result, compared)
    picture = options.out / "recovered.png"
    _save(picture, _contact_sheet(batch, result, compared))
    print(f"Picture: {picture} (each of the client's photographs with what the server recovered below it)")
    return 0 if compared.exact else 1


def _show(progress: Progress) -> None:
    if not sys.stderr.isatty():
        return
    share = f"{progress.starts:,} of at most {progress.total_starts:,} starts"
    print(f"\rfound {progress.found} of {progress.batch_size} directions, {share}", end="", file=sys.stderr, flush=True)


def _show_end() -> None:
    if sys.stderr.isatty():
        print(file=sys.stderr)


def _print_result(result: Inversion, compared: Score) -> None:
    seconds = ", ".join(f"{stage} {spent:.2f} s" for stage, spent in result.stats.seconds.items())
    print(f"Batch size read off the gradient: {result.batch_size}")
    print(f"Recovered without the truth: {result}")
    print(f"Compared with the truth: {compared}")
    print(f"Spent: {result.stats.starts:,} starts, {result.stats.steps:,} start-steps; {seconds}")


def _contact_sheet(batch: Batch, result: Inversion, compared: Score) -> Float[Tensor, "height width 3"]:
    """Each original with the input assigned to it below, sixteen a line; black where none is."""
    originals = batch.normalisation.undo(batch.inputs)
    recovered = torch.zeros_like(originals)
    there = compared.assignment >= 0
    recovered[there] = batch.normalisation.undo(result.inputs[compared.assignment[there]]).to(recovered)
    shape = batch.image_shape or (3, 32, 32)
    pairs = torch.cat([originals.reshape(-1, *shape), recovered.reshape(-1, *shape)], dim=2).clamp(0, 1)
    framed = torch.nn.functional.pad(pairs, (1, 1, 1, 3), value=1.0)
    lines = [torch.cat(list(part), dim=2) for part in framed.split(PER_LINE)]
    width = max(line.shape[2] for line in lines)
    sheet = torch.cat([torch.nn.functional.pad(line, (0, width - line.shape[2]), value=1.0) for line in lines], dim=1)
    return sheet.permute(1, 2, 0).repeat_interleave(2, 0).repeat_interleave(2, 1)


def _save(path: Path, picture: Float[Tensor, "height width 3"]) -> None:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("Pillow", "data") from error
    Image.fromarray((picture * 255).round().numpy().astype(numpy.uint8)).save(path)


if __name__ == "__main__":
    sys.exit(main())
