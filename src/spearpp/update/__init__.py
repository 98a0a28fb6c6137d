"""A client's update together with the weights that the server sent: everything that an audit needs."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from spearpp.errors import DataError, OptionError
from spearpp.types import LayerTensors
from spearpp.update.coerce import (
    copied,
    copied_weights,
    finite,
    in_floats,
    moved_to,
    parameters_and_buffers,
    plain_lr_and_steps,
)
from spearpp.update.files import FileName, open_tensors
from spearpp.update.lazy import Lazy, Named, elementwise, tensor_specs
from spearpp.update.names import Tensors, match
from spearpp.update.saved import KINDS, THREAT_MODEL, Kind, fields_of_saved, write_saved

__all__ = ["KINDS", "ClientUpdate", "Kind"]


@dataclass(frozen=True, eq=False)
class ClientUpdate:
    """The weights that a client started from, and the gradient that it sent for each of them.

    If the client sent weights or weight differences, they are converted to gradients.

    An update that was loaded from a file reads a tensor at every access and keeps none in memory. The file must not
    change meanwhile. ``read`` returns an update that does not need the file.

    >>> import torch
    >>> model = torch.nn.Linear(3, 2)
    >>> update = ClientUpdate.from_weights(model, [w - 0.1 for w in model.parameters()], lr=0.1)
    >>> update
    ClientUpdate(2 of 2 parameters, 8 numbers, from weights, lr=0.1)
    >>> bool(torch.allclose(update.gradients["weight"], torch.ones(2, 3), atol=1e-5))
    True
    """

    weights: Named
    """The weights that the server sent to the client, by parameter name."""
    gradients: Named
    """The gradients by parameter name, without parameters that the client did not send. If the client sent weights, a
    "gradient" is (before - after) / (lr · steps), which is only approximately the mean gradient of its training. In
    this formula, an unknown lr and an unknown number of steps count as 1."""
    kind: Kind = "gradients"
    """What the client sent."""
    lr: float | None = None
    """The client's learning rate, or None if it is unknown. The scale of the gradients is then unknown too."""
    steps: int | None = None
    """Number of passes over the batch (full-batch steps, or epochs), or None if it is unknown."""
    clients: int = 1
    """Number of clients whose updates are summed in this one."""
    threat_model: str = THREAT_MODEL
    """Who can see this update, in one sentence."""
    buffers: tuple[str, ...] = field(default=())
    """Names of the running statistics and counters that the client also sent. The audit ignores them."""

    @property
    def scale(self) -> float:
        """The factor lr · steps between ``gradients`` and before - after. 1 if the client sent gradients.

        An unknown lr and an unknown number of steps count as 1.
        """
        return 1.0 if self.kind == "gradients" else (self.lr or 1.0) * (self.steps or 1)

    @property
    def one_gradient(self) -> bool:
        """Whether this is the gradient of one client, and not the result of local steps or a sum of several clients."""
        return self.kind == "gradients" and self.clients == 1

    def __post_init__(self) -> None:
        if not self.gradients:
            raise DataError("the update holds no gradient")
        for field_name, what in (("weights", "weights"), ("gradients", "update")):
            object.__setattr__(self, field_name, finite(getattr(self, field_name), what))
        plain_lr_and_steps(self.lr, self.steps)

    def __repr__(self) -> str:
        numbers = sum(each.numel() for each in tensor_specs(self.gradients).values())
        count = f"{len(self.gradients)} of {len(self.weights)} parameters"
        parts = [count, f"{numbers:,} numbers", f"from {self.kind}"]
        known = {"lr": self.lr, "steps": self.steps, "clients": self.clients if self.clients > 1 else None}
        parts += [f"{name}={value}" for name, value in known.items() if value is not None]
        return f"ClientUpdate({', '.join(parts)})"

    @classmethod
    def from_gradients(cls, model: Tensors, grads: Tensors | None = None) -> "ClientUpdate":
        """Build an update from gradients, which is what a FedSGD client sends.

        Args:
            model: the weights that the client started from: a module, a state dict, or a list in parameter order.
            grads: the gradients by parameter name, or a list in parameter order with None for parameters that were not
                sent. If ``grads`` is None, the ``grad`` attributes of the module's parameters are used.

        Returns:
            An update with copies of all tensors.

        Raises:
            SpearError: if names or shapes do not match, or a value is not finite.
        """
        weights = copied_weights(model)
        if grads is None:
            if not isinstance(model, nn.Module):
                raise OptionError("grads=None takes the gradients from a module: pass a module, or pass grads")
            grads = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
            if not grads:
                raise DataError("the model's parameters have no gradients: call backward() first, or pass grads")
        elif isinstance(grads, Sequence) and not isinstance(grads, str):
            if len(grads) != len(weights):
                raise DataError(f"grads holds {len(grads)} tensors, the model has {len(weights)} parameters")
            grads = {name: each for name, each in zip(weights, grads, strict=True) if each is not None}
        given, buffers = parameters_and_buffers(model, grads)
        return cls(weights, copied(match(weights, given, "grads")), "gradients", buffers=buffers)

    @classmethod
    def from_weights(
        cls,
        before: Tensors,
        after: Tensors,
        *,
        lr: float | None = None,
        steps: int | None = None,
        deltas: bool = False,
    ) -> "ClientUpdate":
        """Build an update from weights before and after local training with SGD, as in FedAvg.

        The sum of the client's gradients is (before - after) / lr. An inversion does not need ``lr``, because it
        computes inputs as ratios of gradients.

        Args:
            before: the weights that the client received: a module, a state dict, or a list in parameter order.
            after: the weights that the client sent back, in one of the same forms.
            lr: the client's learning rate, if known.
            steps: number of full-batch steps, or of epochs, if known.
            deltas: whether ``after`` holds the differences after - before instead of weights.

        Returns:
            An update with copies of all tensors that are in memory.

        Raises:
            SpearError: if names or shapes do not match, or a value is not finite.
        """
        lr, steps = plain_lr_and_steps(lr, steps)
        weights = copied_weights(before)
        given, buffers = parameters_and_buffers(before, after)
        sent = match(weights, in_floats(given), "deltas" if deltas else "after")
        scale = 1.0 / ((1.0 if lr is None else lr) * (steps or 1))
        if deltas:
            gradients = elementwise(lambda delta: -delta * scale, sent)
        elif isinstance(sent, Lazy):
            gradients = elementwise(lambda new, old: (old.to(new.device) - new) * scale, sent, weights)
        else:  # compute now, because the caller may continue to train, and a copy would take the same memory
            gradients = {name: (weights[name].to(new.device) - new) * scale for name, new in sent.items()}
        kind: Kind = "deltas" if deltas else "weights"
        return cls(weights, gradients, kind, lr=lr, steps=steps, buffers=buffers)

    @classmethod
    def sum(cls, updates: "Iterable[ClientUpdate]") -> "ClientUpdate":
        """Add the updates of several clients, which is what a server sees with secure aggregation.

        Args:
            updates: updates that were computed on the same weights, with the same kind, lr and steps.

        Returns:
            The sum. For equally large FedSGD clients it is a multiple of the gradient of all samples.

        Raises:
            SpearError: if the updates differ in weights, kind, lr or steps.
        """
        updates = list(updates)
        if not updates:
            raise OptionError("sum([]): pass at least one update")
        first = updates[0]
        if not all(isinstance(each, ClientUpdate) for each in updates):
            raise OptionError("sum: every element must be a ClientUpdate")
        for other in updates[1:]:
            if (first.kind, first.lr, first.steps) != (other.kind, other.lr, other.steps):
                raise DataError("the updates differ in kind, lr or steps: their sum has no common scale")
            same = first.weights.keys() == other.weights.keys() and first.gradients.keys() == other.gradients.keys()
            if not same or not all(torch.equal(first.weights[n], other.weights[n]) for n in first.weights):
                raise DataError(
                    "the updates were not computed on the same weights: their sum is not the gradient of one model",
                    hint="audit each client separately",
                )
        total = {name: torch.stack([u.gradients[name] for u in updates]).sum(0) for name in first.gradients}
        return replace(
            first,
            gradients=total,
            clients=sum(u.clients for u in updates),
            threat_model="the server sees the sum of several clients' updates and the weights it sent",
        )

    def layer(self, weight: str, bias: str | None) -> LayerTensors:
        """Return (dL/dW, dL/db, W, b) of one layer, in the order of the arguments of ``spearpp.invert``.

        Args:
            weight: name of the layer's weight.
            bias: name of the layer's bias. If it is None, the second and the fourth value are None.
        """
        if bias is None:
            return self.gradients[weight], None, self.weights[weight], None
        return self.gradients[weight], self.gradients[bias], self.weights[weight], self.weights[bias]

    def to(self, device: torch.device | str) -> "ClientUpdate":
        """Return the update on another device."""
        return replace(self, weights=moved_to(self.weights, device), gradients=moved_to(self.gradients, device))

    def read(self) -> "ClientUpdate":
        """Return the update with every tensor in memory. Its files are no longer needed afterwards."""
        return replace(self, weights=dict(self.weights), gradients=dict(self.gradients))

    def verify(self) -> None:
        """Read everything that is still in files, block by block, to report damage before any other work starts.

        Raises:
            SpearError: if a file is damaged, was changed or removed, or holds NaN or Inf.
        """
        for tensors in (self.weights, self.gradients):
            if isinstance(tensors, Lazy):
                for name in tensors:
                    tensors.nonzero(name)

    def save(self, path: FileName) -> None:
        """Write the update to a safetensors file. The file is written completely or not at all.

        Args:
            path: name of the file, which must end in ``.safetensors``. The file's metadata hold ``kind``, ``lr``,
                ``steps`` and the other attributes as JSON.

        Raises:
            OptionError: if the name has another ending.
            DataError: if the file cannot be written.
        """
        if not str(path).endswith(".safetensors"):
            raise OptionError(f"{path}: an update is written as .safetensors")
        write_saved(path, self)

    @classmethod
    def load(
        cls,
        path: FileName,
        *,
        before: Tensors | FileName | None = None,
        kind: Kind = "weights",
        lr: float | None = None,
        steps: int | None = None,
    ) -> "ClientUpdate":
        """Load an update that ``save`` wrote, or a file of tensors together with the weights before training.

        Nothing in the file is executed. Tensors are read when they are used, so damaged numbers raise an error only
        then. Call ``verify`` to check them now.

        Args:
            path: a file or folder in one of the formats that ``open_tensors`` lists.
            before: the weights that the server sent: a module, a state dict, a list or another file. Files that
                ``save`` wrote contain these weights, so ``before`` must be None for them.
            kind: what a file of another program holds: "weights" after training, "deltas" or "gradients".
            lr: the learning rate, if known.
            steps: number of passes over the client's data (epochs, or full-batch steps), if known.

        Raises:
            SpearError: if the file does not hold a complete update.
        """
        tensors, header = open_tensors(path)
        if header:
            if before is not None:
                why = "a file that spearpp wrote contains the weights before training"
                raise OptionError(f"{path}: {why}. Leave out before", hint="pass this file alone: spearpp audit FILE")
            if lr is not None or steps is not None:
                why = "a file that spearpp wrote also says what is known about lr and steps"
                raise OptionError(f"{path}: {why}. Leave out lr and steps", hint="leave out --lr and --steps")
            return cls(**fields_of_saved(tensors, header, path))
        if kind not in KINDS:
            raise OptionError(f"kind={kind!r}: must be one of {', '.join(KINDS)}")
        if before is None:
            why = "does not hold the weights that the client started from, so a second file is needed"
            how = "--before in spearpp watch, before= in Python"
            raise OptionError(f"{path} {why} ({how})", hint="give both files: spearpp audit BEFORE UPDATE")
        if isinstance(before, str | os.PathLike):
            sent, sent_header = open_tensors(before)
            before = fields_of_saved(sent, sent_header, before)["weights"] if sent_header else sent
        if kind == "gradients":
            return cls.from_gradients(before, tensors)
        return cls.from_weights(before, tensors, lr=lr, steps=steps, deltas=kind == "deltas")
