"""Simulated clients and data: gradients follow the chain rule, data equals its source, bad files are rejected."""

import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import present
from spearpp import simulate
from spearpp.errors import DataError, OptionError
from spearpp.update.files import read_tensors


@given(st.integers(1, 6), st.integers(2, 20), st.lists(st.integers(2, 15), min_size=1, max_size=3), st.booleans())
def test_the_gradient_is_d_times_x_transposed(b: int, n: int, hidden: list[int], bias: bool) -> None:
    """Theorem 1 of the paper, with D taken from a hook on the real backward pass."""
    batch = simulate.random_batch(b, features=n)
    model = simulate.mlp(n, hidden, 4, bias=bias, dtype=torch.float64)
    batch = simulate.Batch(batch.inputs, batch.labels % 4, batch.normalisation)
    kept: list[torch.Tensor] = []

    def keep(_module: torch.nn.Module, _into: object, out: tuple[torch.Tensor, ...] | torch.Tensor) -> None:
        kept.append(out[0])

    handle = model[0].register_full_backward_hook(keep)
    inputs = batch.inputs.double().requires_grad_()
    torch.nn.functional.cross_entropy(model(inputs), batch.labels).backward()
    handle.remove()
    seen = simulate.fedsgd(model, batch)[0]
    d = kept[-1]
    torch.testing.assert_close(seen.grad_weight, d.T @ inputs.detach())
    inactive = model[0](inputs) <= 0
    assert bool((d[inactive] == 0).all())
    if bias:
        torch.testing.assert_close(seen.grad_bias, d.sum(0))
    else:
        assert seen.grad_bias is None
        assert seen.bias is None


def test_networks_are_drawn_from_the_generator_like_pytorchs() -> None:
    first, second, other = (
        simulate.mlp(50, [40, 30], 10, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    ours, same, differs = (next(model.parameters()).detach() for model in (first, second, other))
    assert torch.equal(ours, same)
    assert not torch.equal(ours, differs)
    default = torch.nn.Linear(50, 40).weight.detach()
    assert float(ours.abs().max()) <= 50**-0.5
    assert float(ours.std()) == pytest.approx(float(default.std()), rel=0.1)


def test_any_layer_can_be_looked_at() -> None:
    batch = simulate.random_batch(3, features=8)
    model = simulate.mlp(8, [7, 6], 10)
    shapes = [tuple(layer.grad_weight.shape) for layer in simulate.fedsgd(model, batch)]
    assert shapes == [(7, 8), (6, 7), (10, 6)]
    with pytest.raises(OptionError, match="labels 0 to 9, the model 3 outputs"):
        simulate.fedsgd(simulate.mlp(8, [7], 3), simulate.random_batch(40, features=8))
    with pytest.raises(OptionError, match="at least one hidden layer"):
        simulate.mlp(8, [], 10)


LOADERS: list[tuple[Callable[..., simulate.Batch], int, tuple[int, int, int] | None]] = [
    (simulate.random_batch, 64, None),
    (simulate.photographs, 3072, (3, 32, 32)),
    (simulate.digits, 64, (1, 8, 8)),
    (simulate.breast_cancer, 30, None),
]


@pytest.mark.parametrize(("load", "features", "image_shape"), LOADERS)
def test_data_has_its_shape_scale_and_seed(
    load: Callable[..., simulate.Batch], features: int, image_shape: tuple[int, int, int] | None
) -> None:
    batch = load(200, generator=torch.Generator().manual_seed(0))
    raw = load(200, generator=torch.Generator().manual_seed(0), normalise=False)
    again = load(200, generator=torch.Generator().manual_seed(0))
    assert batch.inputs.shape == (200, features)
    assert batch.labels.shape == (200,)
    assert batch.image_shape == image_shape
    assert torch.equal(batch.inputs, again.inputs)
    assert float(raw.inputs.min()) >= 0
    assert float(raw.inputs.max()) <= 1
    torch.testing.assert_close(batch.normalisation.undo(batch.inputs), raw.inputs, atol=1e-5, rtol=0)
    assert abs(float(batch.inputs.mean())) < 0.3
    assert 0.7 < float(batch.inputs.std()) < 1.4


def test_photographs_are_really_photographs() -> None:
    import skimage.data

    tiles = simulate.photographs(1, size=16, normalise=False, generator=torch.Generator().manual_seed(1))
    name = ["astronaut", "chelsea", "coffee", "rocket", "immunohistochemistry", "stereo_motorcycle"][
        int(tiles.labels[0])
    ]
    loaded = getattr(skimage.data, name)()
    picture = numpy.asarray(loaded[0] if isinstance(loaded, tuple) else loaded, dtype=float) / 255
    height, width = (extent // 4 * 4 for extent in picture.shape[:2])
    small = picture[:height, :width].reshape(height // 4, 4, width // 4, 4, 3).mean((1, 3))
    tile = tiles.inputs[0].reshape(3, 16, 16).permute(1, 2, 0).numpy()
    windows = numpy.lib.stride_tricks.sliding_window_view(small, (16, 16, 3))
    assert numpy.abs(windows - tile).max(axis=(-1, -2, -3)).min() < 1e-5


def test_names_of_columns_come_along() -> None:
    names = present(simulate.breast_cancer(2).feature_names)
    assert len(names) == 30


def test_data_sets_have_an_end() -> None:
    with pytest.raises(DataError, match="1797"):
        simulate.digits(5000)
    with pytest.raises(DataError, match="at least one tile"):
        simulate.photographs(0)
    with pytest.raises(DataError, match="at least 1"):
        simulate.random_batch(0)


class TestCifarFiles:
    """The file comes from somewhere else."""

    def write(self, path: Path, **arrays: numpy.ndarray) -> Path:
        numpy.savez(path, allow_pickle=True, **arrays)
        return path

    def test_it_is_read_from_a_file_a_folder_or_the_environment(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pixels = numpy.random.default_rng(0).integers(0, 256, (12, 3, 32, 32), dtype=numpy.uint8)
        file = self.write(tmp_path / "cifar10_test.npz", x=pixels, y=numpy.arange(12, dtype=numpy.uint8) % 10)
        for path in (file, tmp_path):
            batch = simulate.cifar10(12, path=path, normalise=False)
            sums = batch.inputs.double().sum(1).sort().values
            expected = torch.from_numpy(numpy.sort(pixels.reshape(12, -1).sum(1) / 255))
            torch.testing.assert_close(sums, expected, rtol=1e-6, atol=0)
        monkeypatch.setenv("SPEARPP_DATA", str(tmp_path))
        assert simulate.cifar10(3).inputs.shape == (3, 3072)
        monkeypatch.delenv("SPEARPP_DATA")
        with pytest.raises(DataError, match="SPEARPP_DATA"):
            simulate.cifar10(3)

    def test_other_arrays_are_refused(self, tmp_path: Path) -> None:
        wrong = self.write(tmp_path / "a.npz", x=numpy.zeros((3, 32, 32), numpy.uint8), y=numpy.zeros(3))
        with pytest.raises(DataError, match=r"expected uint8"):
            simulate.cifar10(1, path=wrong)
        missing = self.write(tmp_path / "b.npz", x=numpy.zeros((1, 3, 32, 32), numpy.uint8))
        with pytest.raises(DataError, match="arrays x and y"):
            simulate.cifar10(1, path=missing)

    def test_a_file_that_unpacks_to_too_much_is_refused_before_it_does(self, tmp_path: Path) -> None:
        bomb = tmp_path / "bomb.npz"
        with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("x.npy", bytes(2**22))
        with pytest.raises(DataError, match="unpacks to 4,194,304 bytes, more than the 1,048,576 allowed"):
            read_tensors(bomb, largest=2**20)

    def test_a_header_that_claims_too_much_is_refused(self, tmp_path: Path) -> None:
        header = tmp_path / "x.npy"
        with header.open("wb") as file:
            numpy.lib.format.write_array_header_1_0(
                file, {"descr": "|u1", "fortran_order": False, "shape": (10**12, 3, 32, 32)}
            )
        claims = tmp_path / "claims.npz"
        with zipfile.ZipFile(claims, "w") as archive:
            archive.write(header, "x.npy")
            archive.write(header, "y.npy")
        with pytest.raises(DataError, match="claims an array"):
            simulate.cifar10(1, path=claims)
