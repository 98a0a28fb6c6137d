"""How to show inputs: as images or as table rows, on which scale, and with which column names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from spearpp.auditing import AuditResult
from spearpp.errors import DataError, OptionError
from spearpp.normalisation import Normalisation
from spearpp.pictures import Shape, guess_shape, on_unit_scale
from spearpp.simulate import Batch
from spearpp.simulate.batch import normalisation_of
from spearpp.types import Float, Tensor


@dataclass(frozen=True, eq=False)
class Presentation:
    """How a report shows recovered inputs."""

    shape: Shape | None = None
    """Channels, height and width of an image. None shows inputs as table rows."""
    mean: tuple[float, ...] = ()
    """Mean of the normalisation: one number, one per channel or one per column. Empty if unknown."""
    std: tuple[float, ...] = ()
    """Standard deviation of the normalisation, in the same format. Empty if unknown."""
    columns: tuple[str, ...] = ()
    """Column names of tabular inputs. Empty if unknown."""

    @classmethod
    def of(cls, features: int, truth: Batch | None = None, **given: Any) -> "Presentation":
        """Choose how to show inputs.

        Each value comes from ``given`` if it is there, else from the true batch, else from the number of features.

        Args:
            features: Numbers per input. 0 means that there are no inputs to show.
            truth: The client's true batch, if known.
            **given: ``shape``, ``mean``, ``std``, ``columns``, and ``records=True`` to show inputs as table rows.

        Raises:
            OptionError: If a given value does not match the number of features.
        """
        if not features:
            return cls()
        shape, columns = given.get("shape"), tuple(given.get("columns") or ())
        mean, std = tuple(given.get("mean") or ()), tuple(given.get("std") or ())
        if truth is not None:
            columns = columns or truth.feature_names or ()
            shape = shape or (None if columns else truth.image_shape)
            if not mean:
                mean, std = (_per_channel(each) for each in (truth.normalisation.mean, truth.normalisation.std))
        if shape is None and not columns and not given.get("records"):
            shape = guess_shape(features)
        if shape is not None and shape[0] * shape[1] * shape[2] != features:
            size = "x".join(map(str, shape))
            raise OptionError(f"an image of shape {size} does not match inputs of {features} numbers")
        if columns and len(columns) != features:
            raise OptionError(f"{len(columns)} column names do not match inputs of {features} numbers")
        presentation = cls(None if columns else shape, mean, std, columns)
        presentation.normalisation(features)  # Raises if the mean or the deviation has the wrong length.
        return presentation

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> "Presentation":
        """Read a presentation from the content of ``report.json``.

        Raises:
            DataError: If a field is missing or invalid.
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
            raise DataError(f"cannot read the field 'presentation' of the report: {error!r}") from error

    def normalisation(self, features: int) -> Normalisation | None:
        """Return the normalisation that maps the [0, 1] scale to inputs of this size. None if it is unknown."""
        if not self.mean and not self.std:
            return None
        try:
            return normalisation_of(torch.tensor(self.mean), torch.tensor(self.std), features, self.shape)
        except DataError as error:
            raise OptionError(str(error)) from error

    def own_scale(self, inputs: Float[Tensor, "k n"]) -> Float[Tensor, "k n"]:
        """Map inputs to the scale of the data.

        A known normalisation is undone. Images of unknown normalisation are stretched to [0, 1]. Other inputs are kept.
        """
        inputs = inputs.detach().double().cpu()
        known = self.normalisation(inputs.shape[1]) if inputs.shape[1] else None
        if known is not None:
            return known.undo(inputs)
        return inputs if self.shape is None or not inputs.shape[1] else on_unit_scale(inputs, self.shape)


def presented(result: AuditResult, truth: Batch | None = None, **given: Any) -> Presentation:
    """Choose how to show the inputs of an audit. The other arguments are those of ``Presentation.of``."""
    return Presentation.of(shown_width(result), shown_truth(result, truth), **given)


def shown_truth(result: AuditResult, truth: Batch | None) -> Batch | None:
    """Return the true batch in the form of the inputs that the report shows, or None if it cannot be compared."""
    return None if truth is None or shows_features(result) else truth.as_rows(shown_width(result))


def shown_width(result: AuditResult) -> int:
    """Return how many numbers an input has in the layer that the report shows. 0 if the report shows no layer."""
    return 0 if result.shown is None or result.shown.inversion is None else result.shown.inversion.inputs.shape[1]


def shows_features(result: AuditResult) -> bool:
    """Return whether the report shows features of an inner layer instead of the model's inputs."""
    return result.shown is not None and result.shown.layer.sees == "features"


def _per_channel(column: Tensor) -> tuple[float, ...]:
    """Shorten one number per feature to one per channel, if the values form runs of equal length."""
    values, counts = column.unique_consecutive(return_counts=True)
    short = values if len(counts.unique()) == 1 else column
    return tuple(float(each) for each in short.tolist())
