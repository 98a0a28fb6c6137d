"""What this release is."""

__version__ = "0.1.0"
