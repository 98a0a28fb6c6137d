"""How inputs are shown: as pictures or as records, on which scale, under which names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from spearpp.errors import DataError, OptionError
from spearpp.normalisation import Normalisation
from spearpp.pictures import Shape, guess_shape, on_unit_scale
from spearpp.simulate import Batch
from spearpp.simulate.batch import normalisation_of
from spearpp.types import Float, Tensor


@dataclass(frozen=True, eq=False)
class Presentation:
    """What a reader needs to make sense of a recovered input."""

    shape: Shape | None = None
    """Channels, height, width; None for records."""
    mean: tuple[float, ...] = ()
    """One number, one a channel or one a column; empty where the normalisation is not known."""
    std: tuple[float, ...] = ()
    columns: tuple[str, ...] = ()
    """Names of a record's columns; empty where they are not known."""

    @classmethod
    def of(cls, features: int, truth: Batch | None = None, **given: Any) -> "Presentation":
        """What is given, else what the truth says, else what can be guessed from the number of columns.

        Raises:
            OptionError: if what is given does not fit so many columns.
        """
        if not features:  # nothing came back: there is nothing to show
            return cls()
        shape, columns = given.get("shape"), tuple(given.get("columns") or ())
        mean, std = tuple(given.get("mean") or ()), tuple(given.get("std") or ())
        if truth is not None:
            columns = columns or truth.feature_names or ()
            shape = shape or (None if columns else truth.image_shape)
            if not mean:
                mean, std = (_short(each) for each in (truth.normalisation.mean, truth.normalisation.std))
        if shape is None and not columns and not given.get("records"):
            shape = guess_shape(features)
        if shape is not None and shape[0] * shape[1] * shape[2] != features:
            raise OptionError(
                f"a picture of shape {'x'.join(map(str, shape))} has not the {features} numbers of an input"
            )
        if columns and len(columns) != features:
            raise OptionError(f"{len(columns)} column names for inputs of {features} numbers")
        made = cls(None if columns else shape, mean, std, columns)
        made.normalisation(features)
        return made

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> "Presentation":
        """From ``report.json``.

        Raises:
            DataError: if it is none.
        """
        try:
            shape = content["shape"]
            return cls(
                None if shape is None else (int(shape[0]), int(shape[1]), int(shape[2])),
                tuple(float(each) for each in content["mean"]),
                tuple(float(each) for each in content["std"]),
                tuple(str(each) for each in content["columns"]),
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(f"the report's presentation cannot be read: {error!r}") from error

    def normalisation(self, features: int) -> Normalisation | None:
        """How inputs came from the [0, 1] scale; None where that is not known."""
        if not self.mean and not self.std:
            return None
        try:
            return normalisation_of(torch.tensor(self.mean), torch.tensor(self.std), features, self.shape)
        except DataError as error:
            raise OptionError(str(error)) from error

    def own_scale(self, inputs: Float[Tensor, "k n"]) -> Float[Tensor, "k n"]:
        """Inputs on the data's own scale: [0, 1] for pictures, else as far as the normalisation is known."""
        inputs = inputs.detach().double().cpu()
        known = self.normalisation(inputs.shape[1]) if inputs.shape[1] else None
        if known is not None:
            return known.undo(inputs)
        return inputs if self.shape is None or not inputs.shape[1] else on_unit_scale(inputs, self.shape)


def _short(column: Tensor) -> tuple[float, ...]:
    """One number for each run of equal ones where these are equally long: channels of an image."""
    values, counts = column.unique_consecutive(return_counts=True)
    short = values if len(counts.unique()) == 1 else column
    return tuple(float(each) for each in short.tolist())
