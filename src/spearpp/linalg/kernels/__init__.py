"""Triton kernels, each with a PyTorch reference of the same signature.

``gated`` holds the steps of the gated search, and the whole descent for small problems. ``paper`` holds the whole
descent of the paper's search. Without Triton, both searches run step by step in PyTorch.
"""
