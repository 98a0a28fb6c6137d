"""Tracing a model into the graph of its operations."""

from torch import fx, nn

from spearpp.model.operations import is_linear


class Tracer(fx.Tracer):
    """Traces into all modules except PyTorch's own. It also traces into Linear layers that override ``forward``."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a call of the module is one node of the graph."""
        del module_qualified_name
        return is_linear(m) or (m.__module__.startswith("torch.nn") and not isinstance(m, nn.Sequential))
