"""``spearpp audit``: audit one update and write a report."""

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from typer import Option

import spearpp
from spearpp import AuditResult, ClientUpdate, Verdict, find_layers
from spearpp import report as reports
from spearpp.auditing.folder import read_document
from spearpp.auditing.vocabulary import Words, words_by_table
from spearpp.cli import console, options
from spearpp.cli.models import describe_model, model_of
from spearpp.dp import DELTA, KAPPA, compare
from spearpp.errors import OptionError
from spearpp.model import named_as
from spearpp.model.embeddings import find_tables
from spearpp.report.decision import decide
from spearpp.report.presentation import presented, shows_features
from spearpp.simulate import Batch
from spearpp.update import Kind
from spearpp.update.rounds import load_rounds


def audit(
    files: options.Files = None,
    rounds: options.Rounds = None,
    model: options.Model = "none",
    kind: options.Kind = "weights",
    lr: options.Rate = None,
    steps: options.Steps = None,
    batch_size: options.BatchSize = None,
    loss: options.ClientLoss = "cross-entropy",
    budget: options.Budget = "60s",
    memory: options.Memory = "8G",
    out: Annotated[
        Path | None,
        Option(help="Folder for the report. Default: audit-NAME, where NAME is the client's file without its ending."),
    ] = None,
    config: options.ConfigFile = None,
    client: Annotated[str | None, Option(help="Name of the client in the report. Default: the client's file.")] = None,
    fail_on: options.FailOn = "never",
    as_json: Annotated[bool, Option("--json", help="Print the content of report.json.")] = False,
    as_sarif: Annotated[bool, Option("--sarif", help="Print the content of report.sarif.")] = False,
    truth: options.Truth = None,
    shape: Annotated[
        str | None,
        Option(
            help="Shape of one input of the model, e.g. 3x32x32. It is used to show inputs as images, and to compute "
            "inputs from features after convolutions. none: show inputs as table rows. Default: guessed."
        ),
    ] = None,
    mean: options.Mean = None,
    std: options.Deviation = None,
    columns: options.Columns = None,
    redact: options.Redact = "none",
    vocabulary: options.Vocabulary = None,
    noise_multiplier: options.NoiseMultiplier = None,
    clip: options.Clip = None,
    sample_rate: options.SampleRate = 1.0,
    dp_steps: options.DPSteps = None,
    kappa: options.Kappa = KAPPA,
    delta: options.Delta = DELTA,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    quiet: options.Quiet = False,
) -> None:
    """Check whether training data can be recovered from an update, and write a report.

    \b
    spearpp audit client7.safetensors --model mlp
    spearpp audit round3.pt client7.pt --lr 0.01 --model mypkg.net:Net
    spearpp audit round3.npz deltas.npz --kind deltas --fail-on leak --sarif > leak.sarif
    spearpp audit --rounds client7/ --model mypkg.net:Net

    \b
    Exit codes: 0 finished, 1 leak (with --fail-on), 2 invalid input, 3 not applicable,
    4 internal error, 130 interrupted.
    Ctrl-C stops the search. The report then contains the inputs certified so far.
    """  # noqa: D301
    if as_json and as_sarif:
        raise OptionError("--json and --sarif cannot be combined. The report folder contains both files")
    history = _read(files or [], rounds, kind, lr, steps)
    source = files or ([] if rounds is None else [rounds])
    batch = None if truth is None else Batch.load(truth)
    display = options.display_options(shape, mean, std, columns)
    network = model_of(model, history[-1])
    history = [named_as(each, network) for each in history]
    words = options.vocabulary(vocabulary)
    epochs = max(each.steps or 1 for each in history)
    stated = options.stated_dp(noise_multiplier, clip, sample_rate, dp_steps, kappa, delta, epochs, len(history))
    check_display(history[-1], network, batch, display)
    check_vocabulary(history[-1], network, words)
    settings: dict[str, Any] = {
        "budget": options.seconds(budget),
        "memory": options.size(memory),
        "batch_size": batch_size,
        "loss": loss,
        "vocabulary": words,
        "input_shape": display["shape"],
    }
    place, folder = options.device_of(device), out or Path(f"audit-{source[-1].resolve().stem}")
    console.make_folder(folder)
    result = run(history if rounds else history[-1], network, seed, place, quiet or as_json or as_sarif, settings)
    presentation, notes = displayable(result, batch, display)
    dp = None if stated is None else compare(stated, history[-1], result, batch_size)
    shown: dict[str, Any] = {"truth": batch, "presentation": presentation, "redact": redact}
    about: dict[str, Any] = {"client": client or source[-1].name, "model": describe_model(model, network)}
    about["dp"] = None if dp is None else dp.to_dict()
    page = write_report(folder, result, history[-1], source, about, config=config, fail_on=fail_on, **shown)
    content = read_document(folder)
    if as_json or as_sarif:
        console.print_json(reports.sarif_log(content) if as_sarif else content)
        console.print_gate(console.output(stderr=True), content, quiet=True)
    else:
        console.print_result(result, page, quiet, truth=batch, dp=dp)
    for note in notes:
        console.output(stderr=True).print(f"note: {note}", markup=False)
    raise typer.Exit(exit_code(result, fail_on, content))


def _read(
    files: list[Path], rounds: Path | None, kind: Kind, lr: float | None, steps: int | None
) -> list[ClientUpdate]:
    """Read one update, or several rounds of one client, and verify all tensors."""
    if bool(files) == (rounds is not None):
        advice = "spearpp audit BEFORE UPDATE, or spearpp audit --rounds FOLDER"
        raise OptionError("pass either an update or --rounds with a folder of updates", hint=advice)
    if rounds is None:
        return [read_update(files, kind, lr, steps)]
    history = load_rounds(rounds, kind=kind, lr=lr, steps=steps)
    for each in history:
        each.verify()
    return history


def read_update(files: list[Path], kind: Kind, lr: float | None, steps: int | None) -> ClientUpdate:
    """Read an update from one or two files and verify all of its tensors.

    A command creates its output folder only afterwards, so that a damaged file leaves no empty folder.
    """
    if len(files) not in (1, 2):
        raise OptionError(f"{len(files)} files were given, expected UPDATE, or BEFORE and UPDATE")
    *before, update = files
    received = ClientUpdate.load(update, before=before[0] if before else None, kind=kind, lr=lr, steps=steps)
    received.verify()
    return received


def check_display(
    update: ClientUpdate, model: torch.nn.Module | None, truth: Batch | None, display: dict[str, Any]
) -> None:
    """Check before the search that the display options match the size of the model's inputs.

    If no layer receives the model's inputs, as after convolutions, their size is unknown and nothing is checked.
    """
    sizes = {layer.features for layer in find_layers(model, update) if layer.sees != "features"}
    if not sizes:
        return
    allowed = f"but the model's inputs have {' or '.join(str(each) for each in sorted(sizes))} numbers"
    if truth is not None and all(truth.as_rows(size) is None for size in sizes):
        advice = "save the inputs that the network receives, or omit --truth"
        raise OptionError(f"--truth has inputs of {truth.inputs.shape[1]} numbers, {allowed}", hint=advice)
    if display["shape"] and (count := math.prod(display["shape"])) not in sizes:
        advice = "omit --shape: the shape is guessed from the number of inputs"
        raise OptionError(f"--shape describes {count} numbers, {allowed}", hint=advice)
    if display["columns"] and (count := len(display["columns"])) not in sizes:
        advice = "give one name for each input of the model, or omit --columns"
        raise OptionError(f"--columns names {count} numbers, {allowed}", hint=advice)


def displayable(
    result: AuditResult, truth: Batch | None, display: dict[str, Any]
) -> tuple[reports.Presentation | None, list[str]]:
    """Return the presentation, as far as it matches what the audit recovered, and sentences about what does not match.

    A wrong display option does not discard a finished audit.
    """
    presentation, notes = None, []
    why = None if truth is None else reports.why_not_compared(result, truth)
    if why is not None and result.best is not None:
        notes.append(why)
    if not shows_features(result):
        try:
            presentation = presented(result, truth, **display)
        except OptionError as error:
            notes.append(f"the display options were not used: {error}")
    return presentation, notes


def check_vocabulary(update: ClientUpdate, model: torch.nn.Module | None, words: Words | None) -> None:
    """Check before the search that the words fit an embedding table of the model."""
    if words is not None and model is None:
        raise OptionError("--vocabulary needs --model, because a checkpoint does not say which weights are embeddings")
    words_by_table(find_tables(model, update), words)


def run(
    update: ClientUpdate | list[ClientUpdate],
    model: torch.nn.Module | None,
    seed: int,
    device: torch.device,
    quiet: bool,
    settings: dict[str, Any],
) -> AuditResult:
    """Audit an update, or several rounds, and show live progress on a terminal unless ``quiet``.

    ``settings`` are further arguments of ``spearpp.audit``.
    """
    placed = update.to(device) if isinstance(update, ClientUpdate) else [each.to(device) for each in update]
    with console.progress(settings.get("budget"), quiet) as show_progress:
        generator = torch.Generator().manual_seed(seed)
        return spearpp.audit(placed, model, generator=generator, progress=show_progress, **settings)


def write_report(
    folder: Path, result: AuditResult, update: ClientUpdate, source: list[Path], about: dict[str, Any], **options: Any
) -> Path:
    """Write the report of an audit that this command ran, and return the path of its page.

    ``options`` are further arguments of ``spearpp.report.write``. Ctrl-C does not leave an incomplete report.
    """
    about = {"received": repr(update), "threat_model": update.threat_model, **about}
    command, files = ["spearpp", *sys.argv[1:]], [str(each) for each in source]
    with console.uninterrupted():
        return reports.write(folder, result, command=command, source=files, about=about, **options)


def exit_code(result: AuditResult, fail_on: str, content: Mapping[str, Any] | None = None) -> int:
    """Return the exit code of an audit with this value of ``--fail-on``.

    ``content`` is that of ``report.json``, with the accepted leaks. Without it, no leak is accepted.
    """
    decided = decide(result.to_dict(), fail_on=fail_on) if content is None else content
    if decided["gate"]["passed"] is False:
        return console.LEAK
    if result.interrupted:
        return console.INTERRUPTED
    return console.NOT_APPLICABLE if result.verdict is Verdict.NOT_APPLICABLE else 0
