"""``spearpp reproduce`` and ``spearpp frontier``: measure tables of the paper, and the effect and cost of defences.

Exit codes: 0 all cells measured, 1 some cells failed (run the command again), 2 invalid input, 130 interrupted.
"""

import json
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from spearpp.cli.running import EngineName, Session, engine_of, open_session
from spearpp.errors import OptionError
from spearpp.experiments import frontier_report, rendering
from spearpp.experiments import reproduce as tables
from spearpp.experiments.defence import AXES, Axis, Defence
from spearpp.experiments.frontier import Line, Plan, measure_line, sentence
from spearpp.experiments.source import Source
from spearpp.experiments.table import TABLES, Method, Scale, Table, load, parse_starts
from spearpp.search import Gated

STORE = Path("spearpp-experiments.sqlite")
StoreOption = Annotated[Path, Option(help="SQLite file that stores every measured batch.")]
EngineOption = Annotated[EngineName, Option(help="local: processes on this machine. ray: a Ray cluster.")]
AddressOption = Annotated[str | None, Option(help="Address of a Ray cluster. Default: start Ray on this machine.")]
WorkersOption = Annotated[int | None, Option(min=1, help="Number of processes per device (with --engine local).")]
DeviceOption = Annotated[str | None, Option(help="cpu, cuda or cuda:0. Default: all GPUs, else all CPU cores.")]
GpusOption = Annotated[float, Option(min=0, help="GPUs for each batch on Ray. 0.25 runs four batches on one GPU.")]
OutOption = Annotated[Path | None, Option(help="Folder for JSON, Markdown, HTML and image files.")]
DataOption = Annotated[
    str,
    Option(
        help="Data set: photographs, digits, breast_cancer, cifar10, an npz, CSV or Parquet file, or a folder of "
        "images."
    ),
]
LabelOption = Annotated[str | None, Option(help="Column that contains the class, for CSV and Parquet files.")]


def reproduce(
    table: Annotated[
        str,
        Argument(
            help=f"Experiment of the paper: {', '.join(TABLES)}. spear measures how the work of SPEAR grows with the "
            "batch size."
        ),
    ],
    method: Annotated[
        Method,
        Option(
            help="Searches to measure. paper: the searches of the paper. gated: the gated search, the default of "
            "spearpp. both: the searches of the paper and the gated search."
        ),
    ] = "both",
    batches: Annotated[int | None, Option(min=1, help="Batches per row. Default: 100, as in the paper.")] = None,
    starts: Annotated[
        str | None,
        Option(
            help="Largest number of starts of the paper's searches: one number, or one per width as in "
            "200:1000000,4000:20000."
        ),
    ] = None,
    width: Annotated[
        list[int] | None,
        Option("--width", "-m", help="Measure only rows with this width m. May be given several times."),
    ] = None,
    scale: Annotated[Scale, Option(help="paper: the full table. small: minutes on a laptop.")] = "paper",
    data: DataOption = "photographs",
    label: LabelOption = None,
    status: Annotated[bool, Option("--status", help="Show the results in the store, and measure nothing.")] = False,
    store: StoreOption = STORE,
    engine: EngineOption = "local",
    address: AddressOption = None,
    workers: WorkersOption = None,
    device: DeviceOption = None,
    gpus: GpusOption = 0.0,
    out: OutOption = None,
) -> None:
    """Measure a table of the paper and print the paper's numbers beside the measured ones.

    \b
    spearpp reproduce table1 --scale small
    spearpp reproduce table1 --data cifar10 --out results
    spearpp reproduce table1 --method gated --batches 10 -m 200
    spearpp reproduce table1 --status
    """  # noqa: D301
    selected = load(
        table,
        method=method,
        scale=scale,
        data=Source.parse(data, label=label),
        batches=batches,
        starts=parse_starts(starts),
        widths=width or (),
    )
    with open_session(store, engine_of(engine, address, workers, device, gpus)) as session:
        if not status:
            session.measure(tables.cells(selected), selected.name)
        _show_table(selected, session, out)


def _show_table(table: Table, session: Session, out: Path | None) -> None:
    found = tables.collect(table, session.store)
    pictures = rendering.pictures(table, session.store) if table.picture else []
    page = rendering.page(found, [*pictures, *(rendering.growth(found) if table.growth else [])])
    session.table(page.title, page.sections[0].rows)
    for note in page.notes:
        session.say(note)
    if out is not None:
        _write(page, table.name, tables.as_json(found), out, session)
    elif pictures:  # A terminal cannot show images, so they are always written.
        _write_files({each.file: each.content for each in pictures}, Path(), session)


def frontier(
    axis: Annotated[
        list[str],
        Option(
            help=f"Parameter to vary: {', '.join(AXES)}. Its values are chosen automatically, or given as in "
            "noise=1e-4,1e-3. A second --axis with values repeats the measurement for each of them."
        ),
    ],
    batch: Annotated[int, Option("--batch", "-b", min=1, help="Samples per client, b.")] = 32,
    width: Annotated[int, Option("--width", "-m", min=1, help="Neurons per hidden layer, m.")] = 512,
    noise: Annotated[float, Option(min=0, help="Standard deviation σ of the noise on the mean gradient.")] = 0.0,
    clip: Annotated[float | None, Option(help="Norm C to which the gradient of each sample is clipped.")] = None,
    steps: Annotated[int, Option(min=1, help="Number of local steps.")] = 1,
    lr: Annotated[float | None, Option(help="Learning rate of the local steps.")] = None,
    mini_batch: Annotated[int | None, Option(min=1, help="Samples per local step. --steps then counts epochs.")] = None,
    keep: Annotated[float, Option(help="Share of the entries that are sent: 0.1 sends the largest 10 %.")] = 1.0,
    bits: Annotated[int, Option(help="Bits per transmitted entry: 2 to 16, or 32.")] = 32,
    clients: Annotated[int, Option(min=1, help="Number of clients with b samples each. Their updates are summed.")] = 1,
    seeds: Annotated[int, Option(min=1, help="Number of batches per point, each with its own seed.")] = 20,
    starts: Annotated[int, Option(min=1, help="Largest number of starts of the search.")] = 2048,
    trainings: Annotated[int, Option(min=0, help="Training runs per point. 0: do not measure the accuracy.")] = 3,
    rounds: Annotated[int, Option(min=1, help="Rounds per training run.")] = 60,
    threshold: Annotated[
        float | None,
        Option(help="PSNR in dB above which an input counts as recovered. Default: 90 or 25, by axis."),
    ] = None,
    level: Annotated[
        float,
        Option(min=0, max=0.99, help="A setting counts as sufficient if at most this share of batches leaks an input."),
    ] = 0.0,
    data: DataOption = "photographs",
    label: LabelOption = None,
    store: StoreOption = STORE,
    engine: EngineOption = "local",
    address: AddressOption = None,
    workers: WorkersOption = None,
    device: DeviceOption = None,
    gpus: GpusOption = 0.0,
    out: OutOption = None,
) -> None:
    """Find the weakest setting of a defence that prevents the recovery of inputs, and its cost in accuracy.

    \b
    spearpp frontier --axis noise -b 32 -m 512
    spearpp frontier --axis noise=1e-4,1e-3,1e-2 --trainings 0 --out results
    spearpp frontier --axis batch --axis width=200,1000 --data digits
    """  # noqa: D301
    axes = [Axis.parse(text) for text in axis]
    if not 1 <= len(axes) <= 2 or (len(axes) == 2 and axes[1][1] is None):
        raise OptionError("--axis: pass one axis, or two where the second has values: --axis noise --axis batch=8,16")
    defence = Defence(batch, width, noise, clip, steps, lr, keep, bits, clients, mini_batch)
    plan = Plan(
        Source.parse(data, label=label),
        Gated(starts=starts),
        seeds=seeds,
        trainings=trainings,
        rounds=rounds,
        threshold=threshold,
        level=level,
    )
    (first, values), others = axes[0], axes[1:]
    defences = [others[0][0].on(defence, value) for value in others[0][1] or []] if others else [defence]
    found: list[Line] = []
    with open_session(store, engine_of(engine, address, workers, device, gpus)) as session:
        for each in defences:
            line = measure_line(first, values, each, plan, session.store, session.measure)
            found.append(line)
            session.table(frontier_report.headline(line), frontier_report.lines(line))
        for line in found:
            session.say(sentence(line) + ".")
        if out is not None:
            second = others[0][0].name if others else None
            name = f"frontier-{first.name}" + (f"-{second}" if second else "")
            _write(frontier_report.page(found, name, second), name, frontier_report.as_json(found), out, session)


def _write(page: rendering.Page, name: str, content: Any, folder: Path, session: Session) -> None:
    """Write the page with its figures, and the same results as JSON."""
    figures = [*(each.plot for each in page.sections if each.plot is not None), *page.figures]
    files: dict[str, str | bytes] = {each.file: each.content for each in figures}
    files[f"{name}.json"] = json.dumps(content, indent=1, ensure_ascii=False)
    files |= {f"{name}.md": page.markdown(), f"{name}.html": page.html()}
    _write_files(files, folder, session)


def _write_files(files: dict[str, str | bytes], folder: Path, session: Session) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    session.say(f"Written to {folder}: {', '.join(files)}")
