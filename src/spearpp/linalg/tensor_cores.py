"""Products of float32 matrices on tensor cores, which round their factors to eleven bits (TF32)."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_LOCK = threading.RLock()


@contextmanager
def tensor_cores(allowed: bool) -> Iterator[None]:
    """Let float32 products use tensor cores (TF32) inside the context, if ``allowed``.

    If the user has chosen a precision with the newer of the two settings of PyTorch, it stays unchanged.
    """
    if not allowed:
        yield
        return
    with _LOCK:  # the setting belongs to the whole process
        try:
            before = torch.backends.cuda.matmul.allow_tf32
            torch.backends.cuda.matmul.allow_tf32 = True
        except RuntimeError:  # the user has used the newer setting, which PyTorch does not allow to mix
            yield
            return
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
