"""What a client sent, and the weights it had been sent: everything an audit needs."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from spearpp.errors import DataError, OptionError
from spearpp.types import Tensor
from spearpp.update.coerce import (
    copied,
    copied_weights,
    finite,
    in_floats,
    moved_to,
    parameters_and_buffers,
    plain_lr_and_steps,
)
from spearpp.update.files import FileName, open_tensors, write_tensors
from spearpp.update.lazy import Lazy, Named, elementwise, pick, tensor_specs
from spearpp.update.names import Tensors, match

FORMAT = 1
Kind = Literal["gradients", "weights", "deltas"]
KINDS: tuple[Kind, ...] = ("gradients", "weights", "deltas")
THREAT = "the server sees one client's update and the weights it sent"


@dataclass(frozen=True, eq=False)
class ClientUpdate:
    """The weights a client had, and the gradient it sent for each of them, or what stands for one.

    Of a file, a tensor is read when it is asked for, anew each time, and kept by whoever asked: the update takes no
    memory, and the file has to stay as it is. ``read`` gives one that does without it.

    >>> import torch
    >>> model = torch.nn.Linear(3, 2)
    >>> update = ClientUpdate.from_weights(model, [w - 0.1 for w in model.parameters()], lr=0.1)
    >>> update
    ClientUpdate(2 of 2 parameters, 8 numbers, from weights, lr=0.1)
    >>> bool(torch.allclose(update.gradients["weight"], torch.ones(2, 3), atol=1e-5))
    True
    """

    weights: Named
    """By parameter name, as they were sent to the client."""
    gradients: Named
    """By parameter name: gradients, or (before - after) / (lr · steps). Parameters that were not sent are left out."""
    kind: Kind = "gradients"
    """What the client sent."""
    lr: float | None = None
    """The learning rate, where it is known; the scale of the gradients is unknown without."""
    steps: int | None = None
    """Passes over the batch, where they are known: steps with the whole batch, or epochs."""
    clients: int = 1
    """How many clients' updates are summed in it."""
    threat_model: str = THREAT
    buffers: tuple[str, ...] = field(default=())
    """Running statistics and counters that came along; they are not looked at."""

    def __post_init__(self) -> None:
        if not self.gradients:
            raise DataError("the update holds no parameter of the model")
        for field_name, what in (("weights", "weights"), ("gradients", "update")):
            object.__setattr__(self, field_name, finite(getattr(self, field_name), what))
        plain_lr_and_steps(self.lr, self.steps)

    def __repr__(self) -> str:
        numbers = sum(each.numel() for each in tensor_specs(self.gradients).values())
        parts = [
            f"{len(self.gradients)} of {len(self.weights)} parameters",
            f"{numbers:,} numbers",
            f"from {self.kind}",
        ]
        known = {"lr": self.lr, "steps": self.steps, "clients": self.clients if self.clients > 1 else None}
        parts += [f"{name}={value}" for name, value in known.items() if value is not None]
        return f"ClientUpdate({', '.join(parts)})"

    @classmethod
    def from_gradients(cls, model: Tensors, grads: Tensors | Sequence[Tensor | None] | None = None) -> "ClientUpdate":
        """What a FedSGD client sends.

        Args:
            model: the weights it had: a module, a state dict, or a list in parameter order.
            grads: by parameter name, or in parameter order with None for what was not sent; None takes the ``grad`` of
                the module's parameters.

        Raises:
            SpearError: if names or shapes do not match, or something is not finite.
        """
        weights = copied_weights(model)
        if grads is None:
            if not isinstance(model, nn.Module):
                raise OptionError("grads=None reads the gradients of a module's parameters: pass the module")
            named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            if not named:
                raise DataError("the model's parameters have no gradients: call backward() first, or pass grads")
            grads = named
        elif isinstance(grads, Sequence):
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
        """What a client sends that trains by itself: one step or many of SGD.

        The sum of its gradients is (before - after) / lr. An inversion does not need lr: inputs are ratios of it.

        Args:
            before: the weights it was sent: a module, a state dict, or a list in parameter order.
            after: the weights it sent back, or
            lr: its learning rate, if known.
            steps: how many steps with the whole batch it took, or epochs, if known.
            deltas: ``after`` holds after - before instead.

        Raises:
            SpearError: if names or shapes do not match, or something is not finite.
        """
        lr, steps = plain_lr_and_steps(lr, steps)
        weights = copied_weights(before)
        given, buffers = parameters_and_buffers(before, after)
        sent = match(weights, in_floats(given), "deltas" if deltas else "after")
        scale = 1.0 / ((1.0 if lr is None else lr) * (steps or 1))
        if deltas:
            gradients = elementwise(lambda moved: -moved * scale, sent)
        elif isinstance(sent, Lazy):
            gradients = elementwise(lambda late, early: (early.to(late.device) - late) * scale, sent, weights)
        else:  # the caller may train on, and a difference is as large as a copy
            gradients = {name: (weights[name].to(late.device) - late) * scale for name, late in sent.items()}
        kind: Kind = "deltas" if deltas else "weights"
        return cls(weights, gradients, kind, lr=lr, steps=steps, buffers=buffers)

    @classmethod
    def sum(cls, updates: "Iterable[ClientUpdate]") -> "ClientUpdate":
        """What secure aggregation shows: the sum of several clients' updates, one large batch.

        Raises:
            SpearError: if they were not computed on the same weights.
        """
        updates = list(updates)
        if not updates:
            raise OptionError("sum([]): at least one update")
        first = updates[0]
        if not all(isinstance(each, ClientUpdate) for each in updates):
            raise OptionError("sum: expected client updates")
        for other in updates[1:]:
            if (first.kind, first.lr, first.steps) != (other.kind, other.lr, other.steps):
                raise DataError("the updates differ in kind, lr or steps: their sum has no one scale")
            same = first.weights.keys() == other.weights.keys() and first.gradients.keys() == other.gradients.keys()
            if not same or not all(torch.equal(first.weights[n], other.weights[n]) for n in first.weights):
                raise DataError(
                    "the updates were not computed on the same weights: their sum is no gradient of one model"
                )
        total = {name: torch.stack([u.gradients[name] for u in updates]).sum(0) for name in first.gradients}
        return replace(
            first,
            gradients=total,
            clients=sum(u.clients for u in updates),
            threat_model="the server sees the sum of several clients' updates and the weights it sent",
        )

    def layer(self, weight: str, bias: str | None) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """(dL/dW, dL/db, W, b) of one layer, as ``spearpp.invert`` takes them."""
        if bias is None:
            return self.gradients[weight], None, self.weights[weight], None
        return self.gradients[weight], self.gradients[bias], self.weights[weight], self.weights[bias]

    def to(self, device: torch.device | str) -> "ClientUpdate":
        """The same on another device."""
        return replace(self, weights=moved_to(self.weights, device), gradients=moved_to(self.gradients, device))

    def read(self) -> "ClientUpdate":
        """The same with every tensor in memory: files that it came from may go."""
        return replace(self, weights=dict(self.weights), gradients=dict(self.gradients))

    def verify(self) -> None:
        """Look through all that is still in files, a block at a time, so that damage is told before any work is done.

        Raises:
            SpearError: if a file is damaged, was changed or is gone, or holds NaN or Inf.
        """
        for tensors in (self.weights, self.gradients):
            if isinstance(tensors, Lazy):
                for name in tensors:
                    tensors.nonzero(name)

    def save(self, path: FileName) -> None:
        """Write it as safetensors, whole or not at all; what is known goes into the header as JSON.

        Raises:
            DataError: if it cannot be written.
        """
        tensors = {f"weights/{name}": tensor for name, tensor in self.weights.items()}
        tensors |= {f"gradients/{name}": tensor for name, tensor in self.gradients.items()}
        header = {
            "format": FORMAT,
            "kind": self.kind,
            "lr": self.lr,
            "steps": self.steps,
            "clients": self.clients,
            "threat_model": self.threat_model,
            "buffers": self.buffers,
            "order": list(self.weights),
        }
        if not str(path).endswith(".safetensors"):
            raise OptionError(f"{path}: an update is written as .safetensors")
        write_tensors(path, tensors, header)

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
        """Read an update that ``save`` wrote, or any file of tensors together with the weights before.

        Args:
            path: ``.safetensors``, ``.pt``, ``.pth`` or ``.npz``.
            before: the weights sent, as a module, a state dict, a list or another file; not needed for our own files.
            kind: what a foreign file holds: "weights" after training, "deltas" or "gradients".
            lr: the learning rate, if known.
            steps: local steps, if known.

        Raises:
            SpearError: for anything that is not a whole update; nothing in the file is run. Tensors are read when they
                are looked at, and an error in the numbers comes then: call ``verify`` to have it now.
        """
        tensors, header = open_tensors(path)
        if header:
            if before is not None or lr is not None or steps is not None:
                raise OptionError(f"{path} is a whole update with its weights and lr: leave out before, lr and steps")
            return _ours(tensors, header, path)
        if kind not in KINDS:
            raise OptionError(f"kind={kind!r}: one of {', '.join(KINDS)}")
        if before is None:
            raise OptionError(f"{path} holds tensors and not the weights that the client had: pass before=")
        if isinstance(before, str | os.PathLike):
            sent, ours = open_tensors(before)
            before = _ours(sent, ours, before).weights if ours else sent
        if kind == "gradients":
            return cls.from_gradients(before, tensors)
        return cls.from_weights(before, tensors, lr=lr, steps=steps, deltas=kind == "deltas")


def _ours(tensors: Lazy, header: Mapping[str, Any], path: FileName) -> ClientUpdate:
    if header.get("format") != FORMAT:
        raise DataError(f"{path} has format {str(header.get('format'))[:20]}, this version reads {FORMAT}")
    groups: dict[str, dict[str, str]] = {"weights": {}, "gradients": {}}
    for name, outline in tensor_specs(tensors).items():
        group, _, rest = name.partition("/")
        if group not in groups or not rest or not outline.dtype.is_floating_point:
            raise DataError(f"{path} holds {name[:80]!r}, which is neither a weight nor a gradient")
        groups[group][rest] = name
    lr, steps, clients, kind = (header.get(name) for name in ("lr", "steps", "clients", "kind"))
    buffers = header.get("buffers") or []
    if not isinstance(clients, int) or isinstance(clients, bool) or clients < 1 or not isinstance(buffers, list):
        raise DataError(f"{path} has a header with wrong clients or buffers")
    if kind not in KINDS:
        raise DataError(f"{path} has a header with a wrong kind: {str(kind)[:20]}")
    lr, steps = plain_lr_and_steps(lr, steps)
    weights = pick(tensors, _ordered(groups["weights"], header.get("order")))
    return ClientUpdate(
        weights,
        match(weights, pick(tensors, groups["gradients"]), str(path)),
        kind,
        lr=lr,
        steps=steps,
        clients=clients,
        threat_model=str(header.get("threat_model", THREAT)),
        buffers=tuple(str(name) for name in buffers),
    )


def _ordered(names: dict[str, str], order: object) -> dict[str, str]:
    """In the order they were written, where the header has it."""
    if not isinstance(order, list) or sorted(map(str, order)) != sorted(names):
        return names
    return {str(name): names[str(name)] for name in order}
