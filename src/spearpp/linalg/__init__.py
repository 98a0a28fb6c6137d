"""Batched linear algebra that does not depend on neural networks, and GPU kernels with their PyTorch references."""
