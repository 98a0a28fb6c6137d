"""Batched linear algebra that knows nothing about gradients of networks, and the GPU kernels beside their reference."""
