"""What to try next, for errors that people meet."""

from spearpp.errors import MissingExtraError, NonFiniteError

HINTS = (
    ("pass before=", "give both files: spearpp audit BEFORE AFTER"),
    ("leave out before", "this file is whole by itself: spearpp audit FILE"),
    ("has none of the update's parameters", "check --model, or leave it out: every 2-D weight is then tried"),
    ("is it another model", "check --model, or leave it out: every 2-D weight is then tried"),
    ("names that are not in the model", "both files must be of one model: first the weights BEFORE, then AFTER"),
    ("no chain of Linear layers", "name your own class, --model pkg.mod:Net, or leave it out"),
    ("more than tensors", "save the state dict alone: torch.save(model.state_dict(), path)"),
    ("expected a file ending in", "save the update as .safetensors, .pt or .npz"),
    ("No such file", "check the path; relative paths start where you are"),
    ("no CIFAR-10 file", "the photographs need no file: --data photographs"),
    ("is a folder of an audit", "spearpp audit --out DIR writes one"),
    ("computed on the same weights", "audit the clients one by one"),
)


def hint(error: Exception) -> str:
    """A line of advice, or nothing."""
    if isinstance(error, MissingExtraError):
        return ""
    if isinstance(error, NonFiniteError):
        return "audit another round: this client's training diverged, or the file is damaged"
    return next((advice for part, advice in HINTS if part in str(error)), "spearpp COMMAND --help has examples")
