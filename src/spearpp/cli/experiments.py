"""``spearpp reproduce`` and ``spearpp frontier``.

Exit codes: 0 all measured, 1 some cells failed (run again to retry), 2 bad input, 130 interrupted.
"""

import base64
import html
import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from spearpp.cli.running import Screen, Session, guarded
from spearpp.errors import OptionError
from spearpp.experiments import figures, frontier_report, rendering, reproduce
from spearpp.experiments.defence import AXES, Axis, Defence
from spearpp.experiments.frontier import Line, Plan, bisect, sentence, sweep
from spearpp.experiments.source import Source
from spearpp.experiments.table import TABLES, Table, load
from spearpp.search import Gated

STORE = Path("spearpp-experiments.sqlite")


class Method(StrEnum):
    """Whose search."""

    paper = "paper"
    gated = "gated"
    both = "both"


class Scale(StrEnum):
    """How much of it."""

    paper = "paper"
    small = "small"


class EngineName(StrEnum):
    """Who measures."""

    local = "local"
    ray = "ray"


StoreOption = Annotated[Path, typer.Option("--store", help="SQLite file that keeps every measured batch.")]
ResumeOption = Annotated[
    bool,
    typer.Option("--resume/--no-resume", help="Go on where the store ends; --no-resume wants a store that is new."),
]
EngineOption = Annotated[EngineName, typer.Option("--engine", help="A pool of processes here, or a Ray cluster.")]
AddressOption = Annotated[
    str | None, typer.Option("--address", help="Of a running Ray cluster; without, Ray starts here.")
]
WorkersOption = Annotated[int | None, typer.Option("--workers", min=1, help="Processes for each device (local).")]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda or cuda:0; default: all GPUs, else cores.")
]
GpusOption = Annotated[
    float, typer.Option("--gpus", min=0, help="GPUs that a batch takes on Ray, 0.25 for four on one.")
]
OutOption = Annotated[Path | None, typer.Option("--out", help="Folder for JSON, Markdown, HTML and pictures.")]
DataOption = Annotated[
    str,
    typer.Option("--data", help="photographs, digits, breast_cancer, cifar10, or an npz, CSV, Parquet file or folder."),
]
LabelOption = Annotated[str | None, typer.Option("--label", help="Column of a table that holds the class.")]


def reproduce_command(
    table: Annotated[str, typer.Argument(help=", ".join(TABLES))],
    method: Annotated[Method, typer.Option("--method", help="The paper's search, ours, or both.")] = Method.both,
    batches: Annotated[
        int | None, typer.Option("--batches", min=1, help="Of each row; default: the paper's 100.")
    ] = None,
    starts: Annotated[
        str | None,
        typer.Option("--starts", help="Of the paper's searches: 65536, or by width: 200:1000000,4000:20000."),
    ] = None,
    width: Annotated[
        list[int] | None, typer.Option("--width", "-m", help="Rows of this m alone; may be repeated.")
    ] = None,
    scale: Annotated[Scale, typer.Option("--scale", help="small: what a laptop finishes in minutes.")] = Scale.paper,
    data: DataOption = "photographs",
    label: LabelOption = None,
    status: Annotated[bool, typer.Option("--status", help="Say what the store holds, and measure nothing.")] = False,
    store: StoreOption = STORE,
    resume: ResumeOption = True,
    engine: EngineOption = EngineName.local,
    address: AddressOption = None,
    workers: WorkersOption = None,
    device: DeviceOption = None,
    gpus: GpusOption = 0.0,
    out: OutOption = None,
) -> None:
    """Measure a table of the paper, with its numbers beside ours."""
    with guarded():
        wanted = load(
            table,
            method=method.value,
            scale=scale.value,
            data=Source.parse(data, label=label),
            batches=batches,
            starts=_starts(starts),
            widths=width or (),
        )
        with Session(store, resume or status, engine.value, address, workers, device, gpus) as session:
            if not status:
                session.measure(reproduce.cells(wanted), wanted.name)
            _show_table(wanted, session, out)
    session.leave()


def _show_table(table: Table, session: Session, out: Path | None) -> None:
    found = reproduce.collect(table, session.store)
    screen = session.screen
    screen.table(f"{table.name}: {table.title}", rendering.COLUMNS, rendering.lines(found))
    for note in rendering.notes(found):
        screen.say(note)
    files: dict[str, str | bytes] = {}
    shown: list[str] = []
    for picture in figures.pictures(table, session.store) if table.picture else []:
        files[f"{picture.name}.png"] = picture.content
        encoded = base64.b64encode(picture.content).decode()
        caption = html.escape(picture.caption)
        shown.append(f'<figure><img src="data:image/png;base64,{encoded}" alt="{caption}">{caption}</figure>')
    if table.growth:
        for name in dict.fromkeys(each.row.name for each in found.results):
            factor = figures.doubling(found, name)
            if factor is not None:
                screen.say(f"{name}: the median of draws or starts grows {factor:.2f}-fold with each sample.")
        for name, drawn in figures.growth(found).items():
            files[f"{table.name}-{name}.svg"] = drawn
            shown.append(drawn)
    files[f"{table.name}.json"] = json.dumps(reproduce.as_json(found), indent=1, ensure_ascii=False)
    files[f"{table.name}.md"] = rendering.markdown(found)
    files[f"{table.name}.html"] = rendering.page(found, shown)
    if out is None and table.picture:  # a picture cannot be printed
        files, out = {name: content for name, content in files.items() if name.endswith(".png")}, Path()
    _write(files, out, screen)


def frontier_command(
    axis: Annotated[
        list[str],
        typer.Option("--axis", help=f"A dial to turn: {', '.join(AXES)}; or noise=1e-4,1e-3 for these values alone."),
    ],
    batch: Annotated[int, typer.Option("--batch", "-b", min=1, help="b, samples of a client.")] = 32,
    width: Annotated[int, typer.Option("--width", "-m", min=1, help="m, neurons of a hidden layer.")] = 512,
    noise: Annotated[float, typer.Option("--noise", min=0, help="σ on each entry of the mean gradient.")] = 0.0,
    clip: Annotated[float | None, typer.Option("--clip", help="C, norm of a sample's gradient at most.")] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Local steps.")] = 1,
    rate: Annotated[float | None, typer.Option("--rate", help="Learning rate of local steps.")] = None,
    mini_batch: Annotated[
        int | None, typer.Option("--mini-batch", min=1, help="Then steps are epochs over these.")
    ] = None,
    keep: Annotated[float, typer.Option("--keep", help="Share of entries that pruning leaves.")] = 1.0,
    bits: Annotated[int, typer.Option("--bits", help="Of an entry on the wire: 2 to 16, or 32.")] = 32,
    clients: Annotated[int, typer.Option("--clients", min=1, help="Summed before the server sees them.")] = 1,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Batches a point.")] = 20,
    starts: Annotated[int, typer.Option("--starts", min=1, help="Of the search, at most.")] = 2048,
    witnesses: Annotated[int, typer.Option("--witnesses", min=1, max=2, help="Layers the server looks at.")] = 2,
    trainings: Annotated[int, typer.Option("--trainings", min=0, help="Training runs a point; 0: no accuracy.")] = 3,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Of a training run.")] = 60,
    train: Annotated[int, typer.Option("--train", min=1, help="Samples that training draws from.")] = 1000,
    test: Annotated[int, typer.Option("--test", min=1, help="Samples that accuracy is measured on.")] = 500,
    threshold: Annotated[float | None, typer.Option("--threshold", help="dB that count as recovered.")] = None,
    level: Annotated[
        float, typer.Option("--level", min=0, max=0.99, help="Share of batches that may still leak.")
    ] = 0.0,
    data: DataOption = "photographs",
    label: LabelOption = None,
    store: StoreOption = STORE,
    resume: ResumeOption = True,
    engine: EngineOption = EngineName.local,
    address: AddressOption = None,
    workers: WorkersOption = None,
    device: DeviceOption = None,
    gpus: GpusOption = 0.0,
    out: OutOption = None,
) -> None:
    """Turn a dial of a defence up until nothing comes back, and say what it costs."""
    with guarded():
        dials = [_dial(text) for text in axis]
        if not 1 <= len(dials) <= 2 or (len(dials) == 2 and dials[1][1] is None):
            raise OptionError("--axis: one dial, or two of which the second has values: --axis noise --axis batch=8,16")
        defence = Defence(batch, width, noise, clip, steps, rate, keep, bits, clients, mini_batch)
        plan = Plan(
            Source.parse(data, label=label),
            Gated(starts=starts),
            *(witnesses, seeds, trainings, rounds, train, test, threshold, level),
        )
        found: list[Line] = []
        (first, values), others = dials[0], dials[1:]
        settings = [others[0][0].on(defence, value) for value in others[0][1] or []] if others else [defence]
        with Session(store, resume, engine.value, address, workers, device, gpus) as session:
            for each in settings:
                if values is None:
                    found.append(bisect(first, each, plan, session.store, session.measure))
                else:
                    found.append(sweep(first, values, each, plan, session.store, session.measure))
                columns = (*frontier_report.COLUMNS[:2], first.symbol, *frontier_report.COLUMNS[3:])
                session.screen.table(frontier_report.headline(found[-1]), columns, frontier_report.lines(found[-1]))
            for line in found:
                session.screen.say(sentence(line) + ".")
            _write(_frontier_files(found, others[0][0].name if others else None), out, session.screen)
    session.leave()


def _frontier_files(found: list[Line], along: str | None) -> dict[str, str | bytes]:
    name = f"frontier-{found[0].axis.name}" + (f"-{along}" if along else "")
    files: dict[str, str | bytes] = {
        f"{name}{f'-{index}' if len(found) > 1 else ''}.svg": frontier_report.plot(each)
        for index, each in enumerate(found)
    }
    edge = frontier_report.boundary(found, along) if along else None
    if edge is not None:
        files[f"{name}.svg"] = edge
    files[f"{name}.json"] = json.dumps(frontier_report.as_json(found), indent=1, ensure_ascii=False)
    files[f"{name}.md"] = frontier_report.markdown(found)
    files[f"{name}.html"] = frontier_report.page(found, [edge] if edge else [])
    return files


def _dial(text: str) -> tuple[Axis, list[float] | None]:
    """A dial, and the values given for it.

    >>> _dial("bits=4,8")[1]
    [4.0, 8.0]
    """
    name, equals, given = text.partition("=")
    if name not in AXES:
        raise OptionError(f"--axis {text}: expected one of {', '.join(AXES)}, perhaps with values as in bits=4,8")
    if not equals:
        return AXES[name], None
    try:
        values = [float(each) for each in given.split(",")]
    except ValueError as error:
        raise OptionError(f"--axis {text}: values are numbers with commas between, as in bits=4,8") from error
    if not all(0 < value < float("inf") for value in values) or (AXES[name].whole and any(v % 1 for v in values)):
        raise OptionError(f"--axis {text}: positive{' whole' if AXES[name].whole else ''} numbers")
    return AXES[name], values


def _starts(text: str | None) -> int | dict[int, int] | None:
    """One number, or one for each width.

    >>> _starts("65536"), _starts("200:1000000,4000:20000")
    (65536, {200: 1000000, 4000: 20000})
    """
    if text is None:
        return None
    try:
        if ":" not in text:
            return int(text)
        return {int(width): int(count) for width, count in (each.split(":") for each in text.split(","))}
    except ValueError as error:
        raise OptionError(f"--starts {text}: a number, or one for each width as in 200:1000000,4000:20000") from error


def _write(files: dict[str, str | bytes], folder: Path | None, screen: Screen) -> None:
    if folder is None or not files:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    screen.say(f"Written to {folder}: {', '.join(files)}")


def register(app: typer.Typer) -> None:
    """Add both commands to an app."""
    app.command("reproduce")(reproduce_command)
    app.command("frontier")(frontier_command)


if __name__ == "__main__":
    own = typer.Typer(add_completion=False, no_args_is_help=True)
    register(own)
    own()
