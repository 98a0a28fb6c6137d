"""Audits inside federated-learning platforms.

``flower`` and ``nvflare`` integrate with these platforms. ``watch`` audits the files of any other platform.
This package imports none of them, because each needs its own extra.
"""
