"""Suggestions for common errors: what the user can try next."""

from spearpp.errors import MissingExtraError, NonFiniteError

CHECK_MODEL = "check --model, or omit it: every 2-D weight is then tried"
CONFIG_EXAMPLE = "docs/howto.md shows an example of spearpp.toml under 'Accept a leak for a limited time'"
HINTS = (
    ("pass either an update or --rounds", "spearpp audit BEFORE AFTER, or spearpp audit --rounds FOLDER"),
    ("pass before=", "give both files: spearpp audit BEFORE AFTER"),
    ("leave out before", "this file already contains the weights: spearpp audit FILE"),
    ("has none of the update's parameters", CHECK_MODEL),
    ("is it another model", CHECK_MODEL),
    ("names that are not in the model", "both files must come from the same model: first BEFORE, then AFTER"),
    ("do not form a chain of Linear layers", "name your own class with --model pkg.mod:Net, or omit --model"),
    ("more than tensors", "save only the state dict: torch.save(model.state_dict(), path)"),
    ("expected a file ending in", "save the update as .safetensors, .pt, .npz or .npy"),
    (" is not valid TOML", CONFIG_EXAMPLE),
    ("[[accept]]", CONFIG_EXAMPLE),
    ("[audit]", CONFIG_EXAMPLE),
    ("[thresholds]", CONFIG_EXAMPLE),
    ("unknown table or key", CONFIG_EXAMPLE),
    ("no browser was found", "spearpp report DIR without --pdf writes the page"),
    ("but this spearpp reads version", "audit the update again to get a report of this version"),
    ("No such file", "check the path. Relative paths start at the current folder"),
    ("no CIFAR-10 file", "the photographs need no file: --data photographs"),
    ("a folder of an audit", "spearpp audit --out DIR writes such a folder"),
    ("computed on the same weights", "audit each client separately"),
    ("--truth has inputs of", "save the inputs that the network receives, or omit --truth"),
    ("--shape describes", "omit --shape: the shape is guessed from the number of inputs"),
    ("--columns names", "give one name for each input of the model, or omit --columns"),
    ("cannot be compared", "spearpp score compares inputs only; the features are in recovered.safetensors"),
    ("contains no recovered inputs", "spearpp report DIR shows what the audit found"),
    ("SPEARPP_DATA", "spearpp simulate --data photographs needs no file"),
    ("in the model it has", CHECK_MODEL),
    ("tensors without names", "pass the model whose parameters these are, or omit --model"),
    ("cannot be written", "choose another --out folder"),
    ("cannot create the folder", "choose another --out folder"),
)
"""Pairs of a part of an error message and the hint for it. The first match wins."""


def hint(error: Exception, command: str = "COMMAND") -> str:
    """Return a suggestion for an error, or an empty string if the error message itself says what to do.

    Args:
        error: The error.
        command: The command that raised it, for a reference to its help.
    """
    if isinstance(error, MissingExtraError):
        return ""
    if isinstance(error, NonFiniteError):
        return "audit another round: the client's training diverged, or the file is damaged"
    return next((advice for part, advice in HINTS if part in str(error)), f"spearpp {command} --help shows examples")
