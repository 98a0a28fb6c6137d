"""Kernels in Triton, each beside a reference of the same signature in PyTorch.

``gated``: the steps of the gated search, and its whole descent of a small problem. ``paper``: the whole descent of the
paper's search. Where Triton is not to be had, both are done step by step in PyTorch.
"""
