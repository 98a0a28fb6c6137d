"""Exit codes. A defect never looks like a verdict."""

LEAK = 1
"""Training data was recovered, and --fail-on leak was given."""
BAD_INPUT = 2
NOT_APPLICABLE = 3
INTERNAL = 4
"""A defect of spearpp itself."""
INTERRUPTED = 130
