"""Forms in which people have their checkpoints: NumPy lists, numbered arrays, prefixes, several files, gzip."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from processes import python
from spearpp import ClientUpdate, Verdict, audit, simulate
from spearpp.cli import main
from spearpp.errors import DataError
from spearpp.model import named_as
from spearpp.update.files import read_tensors
from spearpp.update.names import common_prefix

State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def client() -> tuple[nn.Module, State, State]:
    """A network, its weights, and its weights after one step of SGD."""
    generator = torch.Generator().manual_seed(1)
    model = simulate.mlp(20, [40, 40], 10, generator=generator)
    update = simulate.FedSGD()(model, simulate.random_batch(3, features=20, generator=generator))
    before = {name: each.clone() for name, each in update.weights.items()}
    return model, before, {name: each - 0.1 * update.gradients[name] for name, each in before.items()}


def save_parts(folder: Path, state: State, places: dict[str, str] | None = None) -> None:
    """Write a checkpoint in two files with an index, as Hugging Face libraries do."""
    folder.mkdir(exist_ok=True)
    parts = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    where = {name: parts[index % 2] for index, name in enumerate(state)}
    for part in parts:
        save_file({name: each for name, each in state.items() if where[name] == part}, folder / part)
    index = {"metadata": {}, "weight_map": where if places is None else places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_numpy_arrays_and_numbered_names_are_audited_with_a_model(
    tmp_path: Path, client: tuple[nn.Module, State, State]
) -> None:
    model, before, after = client
    arrays = [[each.numpy() for each in state.values()] for state in (before, after)]
    big_endian = [each.astype(">f4") for each in arrays[1]]
    for start, sent in ((model, arrays[1]), (arrays[0], arrays[1]), (before, big_endian)):
        update = ClientUpdate.from_weights(start, sent, lr=0.1)
        assert audit(update, model, batch_size=3).verdict is Verdict.LEAKS
    for name, each in zip(("before", "after"), arrays, strict=True):
        numpy.savez(tmp_path / f"{name}.npz", *each)
    files = [str(tmp_path / f"{name}.npz") for name in ("before", "after")]
    out = ["--out", str(tmp_path / "out"), "--fail-on", "certified", "-q"]
    assert main(["audit", *files, "--model", "mlp", *out]) == 1
    arrays[1][0] = numpy.array(["a"], dtype=object)
    with pytest.raises(DataError, match="not numbers"):
        ClientUpdate.from_weights(model, arrays[1])


def test_a_list_of_a_state_dict_with_running_statistics_is_named_by_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    state = [each.numpy() for each in model.state_dict().values()]
    update = ClientUpdate.from_weights(model, state)
    assert list(update.gradients) == [name for name, _ in model.named_parameters()]
    assert len(update.buffers) == 3
    assert list(named_as(ClientUpdate.from_weights(state, state), model).weights) == list(update.weights)


def test_a_prefix_of_lightning_does_not_matter(client: tuple[nn.Module, State, State], tmp_path: Path) -> None:
    model, before, after = client
    for name, state in (("before", before), ("after", after)):
        prefixed = {f"model.{key}": each for key, each in state.items()}
        torch.save({"state_dict": prefixed, "epoch": 3}, tmp_path / f"{name}.ckpt")
    both = ClientUpdate.load(tmp_path / "after.ckpt", before=tmp_path / "before.ckpt")
    assert audit(both, model).verdict is Verdict.LEAKS
    assert list(ClientUpdate.load(tmp_path / "after.ckpt", before=model).gradients) == list(before)
    inner = nn.Module()
    inner.model = model
    assert next(iter(named_as(ClientUpdate.from_weights(before, after), inner).gradients)) == "model.0.weight"
    two_copies = [f"{start}.{name}" for start in ("ema", "model") for name in before]
    assert common_prefix(before, two_copies) == ""  # which of the two was trained is unknown
    other = ClientUpdate.from_weights({"x.weight": torch.ones(2, 2)}, {"x.weight": torch.zeros(2, 2)})
    with pytest.raises(DataError, match=r"is it another model\? \(the update has 'x.weight', the model has '0.weight'"):
        audit(other, model)


def test_a_checkpoint_in_several_files_is_read_by_index_and_by_folder(
    tmp_path: Path, client: tuple[nn.Module, State, State]
) -> None:
    model, before, after = client
    save_parts(tmp_path / "before", before)
    save_parts(tmp_path / "after", after)
    for name in ("after", "after/model.safetensors.index.json"):
        update = ClientUpdate.load(tmp_path / name, before=tmp_path / "before")
        assert torch.equal(update.weights["2.weight"], before["2.weight"])
        assert audit(update, model).verdict is Verdict.LEAKS


@pytest.mark.parametrize(
    "index",
    [
        {"0.weight": "../secret.safetensors"},
        {"0.weight": "/etc/passwd"},
        {"0.weight": "..\\secret.safetensors"},
        {"0.weight": "missing.safetensors"},
        {"0.weight": "model.py"},
        {"nothing": "model-00001-of-00002.safetensors"},
        {"0.weight": 3},
        [],
        "[" * 100_000,
    ],
)
def test_a_hostile_index_is_one_error(index: Any, tmp_path: Path, client: tuple[nn.Module, State, State]) -> None:
    save_file({"0.weight": torch.ones(2)}, tmp_path / "secret.safetensors")
    save_parts(tmp_path / "parts", client[1], index if isinstance(index, dict) else None)
    if not isinstance(index, dict):
        text = index if isinstance(index, str) else json.dumps({"weight_map": index})
        (tmp_path / "parts" / "model.safetensors.index.json").write_text(text)
    with pytest.raises(DataError, match="index"):
        read_tensors(tmp_path / "parts")


def test_parts_and_folders_have_limits(tmp_path: Path, client: tuple[nn.Module, State, State]) -> None:
    save_parts(tmp_path / "parts", client[1])
    with pytest.raises(DataError, match="more than the 2,000 allowed"):
        read_tensors(tmp_path / "parts", largest=2000)
    with pytest.raises(DataError, match="folder with no file of tensors"):
        read_tensors(tmp_path)
    for name in ("a.npy", "b.npy"):
        numpy.save(tmp_path / name, numpy.ones(3))
    with pytest.raises(DataError, match=r"several checkpoints \(a.npy, b.npy\)"):
        read_tensors(tmp_path)


def test_single_arrays_are_read_in_every_order(tmp_path: Path) -> None:
    file = tmp_path / "x.npy"
    wanted = numpy.arange(12.0).reshape(3, 4)
    for array in (wanted, numpy.asfortranarray(wanted), wanted.astype(">f8")):
        numpy.save(file, array)
        assert numpy.array_equal(read_tensors(file)[0]["0"].numpy(), wanted)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(DataError):
        read_tensors(file)
    numpy.save(file, numpy.array([{}]), allow_pickle=True)
    with pytest.raises(DataError, match="pickled"):
        read_tensors(file)
    file.write_bytes(b"no array")
    with pytest.raises(DataError, match="npy"):
        read_tensors(file)


def test_gzip_is_unpacked_within_limits(tmp_path: Path, client: tuple[nn.Module, State, State]) -> None:
    model, before, after = client
    for name, state in (("before.pt", before), ("after.safetensors", after)):
        plain = tmp_path / name
        torch.save(state, plain) if name.endswith(".pt") else save_file(state, plain)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(plain.read_bytes()))
    update = ClientUpdate.load(tmp_path / "after.safetensors.gz", before=tmp_path / "before.pt.gz")
    assert audit(update, model).verdict is Verdict.LEAKS
    bomb, cut, text, twice = (tmp_path / name for name in ("bomb.pt.gz", "cut.pt.gz", "text.pt.gz", "x.gz.gz"))
    bomb.write_bytes(gzip.compress(bytes(10**7)))
    with pytest.raises(DataError, match="unpacks to more than"):
        read_tensors(bomb, largest=10**6)
    cut.write_bytes((tmp_path / "before.pt.gz").read_bytes()[:-100])
    text.write_bytes(b"no gzip")
    twice.write_bytes(gzip.compress(b"x"))
    for file, why in ((bomb, "PyTorch"), (cut, "unpacked"), (text, "unpacked"), (twice, "update.pt.gz")):
        with pytest.raises(DataError, match=why) as error:
            read_tensors(file)
        assert str(file) in str(error.value)


def test_wrong_types_are_one_clear_error() -> None:
    """In a process of its own, because the tests check the types of all arguments."""
    script = """
import torch, spearpp
from torch import nn
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
before = model.state_dict()
update = spearpp.ClientUpdate.from_weights(before, {name: each + 1 for name, each in before.items()})
def error_of(call, *arguments, **options):
    try:
        return call(*arguments, **options)
    except spearpp.SpearError as error:
        return str(error)
for wrong in (before, "net.py:Net", nn.Linear, 3):
    assert "expected a" in error_of(spearpp.audit, update, wrong)
    assert "expected a" in error_of(spearpp.find_layers, wrong, update)
for wrong in (before, model, "after.pt", None):
    assert "from_weights or load" in error_of(spearpp.audit, wrong, model)
    assert "from_weights or load" in error_of(spearpp.find_layers, model, wrong)
    assert "from_weights or load" in error_of(spearpp.check, wrong, [])
assert "round 2 is a str: expected a" in error_of(spearpp.audit, [update, "round2.pt"], model)
for options in ({"generator": 0}, {"search": "gated"}, {"budget": "60s"}, {"batch_size": 3.0}):
    assert next(iter(options)) in error_of(spearpp.audit, update, model, **options)
for wrong in ("x", 3, iter([])):
    assert "expected a module, a state dict or a list" in error_of(spearpp.ClientUpdate.from_weights, model, wrong)
    assert "expected a module, a state dict or a list" in error_of(spearpp.ClientUpdate.from_gradients, model, wrong)
"""
    python("-c", script)
