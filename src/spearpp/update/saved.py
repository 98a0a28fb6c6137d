"""The file that ``ClientUpdate.save`` writes: safetensors with weights, gradients and a header in JSON."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from spearpp.errors import DataError
from spearpp.update.coerce import plain_lr_and_steps
from spearpp.update.files import FileName, write_tensors
from spearpp.update.lazy import Lazy, pick, tensor_specs
from spearpp.update.names import match

if TYPE_CHECKING:
    from spearpp.update import ClientUpdate

FORMAT = 1
"""Version of the file format. Files of other versions are rejected."""
Kind = Literal["gradients", "weights", "deltas"]
KINDS: tuple[Kind, ...] = get_args(Kind)
THREAT_MODEL = "the server sees one client's update and the weights it sent"


def write_saved(path: FileName, update: "ClientUpdate") -> None:
    """Write an update to a file. The file is written completely or not at all.

    Raises:
        DataError: if the file cannot be written.
    """
    tensors = {f"weights/{name}": tensor for name, tensor in update.weights.items()}
    tensors |= {f"gradients/{name}": tensor for name, tensor in update.gradients.items()}
    attributes = ("kind", "lr", "steps", "clients", "threat_model", "buffers")
    header = {name: getattr(update, name) for name in attributes}
    write_tensors(path, tensors, {"format": FORMAT, **header, "order": list(update.weights)})


def fields_of_saved(tensors: Lazy, header: Mapping[str, Any], path: FileName) -> dict[str, Any]:
    """Return the fields of the update in a file, after checking every entry of its header.

    Raises:
        SpearError: if the file has another version or an invalid entry.
    """
    if header.get("format") != FORMAT:
        if "format" not in header:
            why = f"{path} is not an update that spearpp wrote"
            raise DataError(why, hint="is it the file of the client's true batch? Pass that file with --truth")
        raise DataError(f"{path} has format {str(header['format'])[:20]}, this version reads {FORMAT}")
    groups: dict[str, dict[str, str]] = {"weights": {}, "gradients": {}}
    for name, spec in tensor_specs(tensors).items():
        group, _, parameter = name.partition("/")
        if group not in groups or not parameter or not spec.dtype.is_floating_point:
            raise DataError(f"{path} holds {name[:80]!r}, which is neither a weight nor a gradient")
        groups[group][parameter] = name
    lr, steps, clients, kind = (header.get(name) for name in ("lr", "steps", "clients", "kind"))
    buffers, order = header.get("buffers") or [], header.get("order")
    if not isinstance(clients, int) or isinstance(clients, bool) or clients < 1 or not isinstance(buffers, list):
        raise DataError(f"{path} has a header with invalid clients or buffers")
    if kind not in KINDS:
        raise DataError(f"{path} has a header with an invalid kind: {str(kind)[:20]}")
    lr, steps = plain_lr_and_steps(lr, steps)
    names = groups["weights"]
    if isinstance(order, list) and sorted(map(str, order)) == sorted(names):
        names = {str(name): names[str(name)] for name in order}
    weights = pick(tensors, names)
    return {
        "weights": weights,
        "gradients": match(weights, pick(tensors, groups["gradients"]), str(path)),
        "kind": kind,
        "lr": lr,
        "steps": steps,
        "clients": clients,
        "threat_model": str(header.get("threat_model", THREAT_MODEL)),
        "buffers": tuple(str(name) for name in buffers),
    }
