"""Exit codes of the commands. An internal error has a code that no verdict uses."""

LEAK = 1
"""Training data was recovered and ``--fail-on`` asked for this exit code."""
BAD_INPUT = 2
"""A file, an option or a model is invalid."""
NOT_APPLICABLE = 3
"""No layer of the update can be inverted."""
INTERNAL = 4
"""A defect in spearpp itself."""
INTERRUPTED = 130
"""The user pressed Ctrl-C. The value is 128 + SIGINT, the convention of Unix shells."""
