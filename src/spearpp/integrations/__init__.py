"""The audit where the updates are: ``flower`` and ``nvflare`` for these platforms, ``watch`` for files of any other.

Nothing is imported here: each module needs its own extra.
"""
