"""Updates in files: a layer is read when it is needed, and a file that changes meanwhile is reported."""

import copy
import os
import pickle
import weakref
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import spearpp
from processes import python
from spearpp import ClientUpdate, Verdict, check, find_layers, simulate
from spearpp.auditing.plan import BYTES_PER_INVERTED_WEIGHT
from spearpp.cli import main
from spearpp.cli.models import model_of
from spearpp.errors import DataError, NonFiniteError, OptionError
from spearpp.types import Tensor
from spearpp.update import lazy, npz, source
from spearpp.update.files import open_tensors, read_tensors
from spearpp.update.source import BinaryFile

RATE = 0.1
FORMATS = ("ours", "safetensors", "pt", "transposed.pt", "sparse.pt", "old.pt", "npz", "packed.npz", "fortran.npz")
LAZY = tuple(each for each in FORMATS if each not in ("sparse.pt", "old.pt"))


def network() -> nn.Sequential:
    return simulate.mlp(30, [60, 50], 10, generator=torch.Generator().manual_seed(2))


def sent() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights before and after a step with six samples."""
    model = network()
    batch = simulate.random_batch(6, features=30, generator=torch.Generator().manual_seed(1))
    update = simulate.FedSGD()(model, batch)
    before = dict(update.weights)
    return before, {name: before[name] - RATE * update.gradients[name] for name in before}


def write(path: Path, tensors: dict[str, Tensor]) -> Path:
    """A file of tensors in the format that its name says."""
    arrays = {name: each.numpy() for name, each in tensors.items()}
    if path.name.endswith("fortran.npz"):
        arrays = {name: numpy.asfortranarray(each) for name, each in arrays.items()}
    if path.name.endswith("packed.npz"):
        numpy.savez_compressed(path, allow_pickle=False, **arrays)
    elif path.suffix == ".npz":
        numpy.savez(path, allow_pickle=False, **arrays)
    elif path.name.endswith("transposed.pt"):
        torch.save({name: each.T.contiguous().T if each.ndim == 2 else each for name, each in tensors.items()}, path)
    elif path.name.endswith("sparse.pt"):
        torch.save({name: each.to_sparse() for name, each in tensors.items()}, path)
    elif path.name.endswith("old.pt"):
        torch.save(tensors, path, _use_new_zipfile_serialization=False)
    elif path.suffix == ".pt":
        torch.save({"epoch": 1, "state_dict": tensors}, path)
    else:
        save_file(tensors, path)
    return path


def saved(folder: Path, kind: str) -> ClientUpdate:
    """The same update from files of one format."""
    before, after = sent()
    if kind == "ours":
        ClientUpdate.from_weights(before, after, lr=RATE).save(folder / "ours.safetensors")
        return ClientUpdate.load(folder / "ours.safetensors")
    old, new = (write(folder / f"{name}.{kind}", each) for name, each in (("before", before), ("after", after)))
    return ClientUpdate.load(new, before=old, lr=RATE)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of numbers that are read from files, block by block."""
    sizes: list[int] = []
    fill = source.fill

    def counted(file: BinaryFile, tensor: Tensor, path: Path) -> None:
        sizes.append(tensor.nbytes)
        fill(file, tensor, path)

    monkeypatch.setattr(source, "fill", counted)
    monkeypatch.setattr(npz, "fill", counted)
    return sizes


class TestReading:
    @pytest.mark.parametrize("numbers", [2**20, 470])
    @pytest.mark.parametrize("kind", FORMATS)
    def test_it_is_the_same_to_the_last_bit(
        self, tmp_path: Path, kind: str, numbers: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lazy, "NUMBERS_PER_BLOCK", numbers)
        whole, update = ClientUpdate.from_weights(*sent(), lr=RATE), saved(tmp_path, kind)
        order = {name: name for name in update.weights}
        assert set(order) == set(whole.weights)
        for seen, known in ((update.weights, whole.weights), (update.gradients, whole.gradients)):
            assert all(torch.equal(seen[name], known[name]) for name in order)
        same = ClientUpdate(lazy.pick(whole.weights, order), lazy.pick(whole.gradients, order), "weights", lr=RATE)
        layers = find_layers(None, same)
        assert find_layers(None, update) == layers
        assert check(update, layers) == check(same, layers)

    @pytest.mark.parametrize("kind", LAZY)
    def test_opening_reads_no_numbers_and_a_look_those_of_its_layer(
        self, tmp_path: Path, kind: str, taken: list[int]
    ) -> None:
        update = saved(tmp_path, kind)
        repr(update)
        model_of("mlp", update)
        assert taken == []
        update.weights["2.bias"]
        assert sum(taken) == 4 * 50
        update.gradients["2.weight"]
        assert sum(taken) == 4 * 50 + 4 * 50 * 60 * (1 if kind == "ours" else 2)

    def test_a_view_of_something_larger_is_read_without_it(self, tmp_path: Path, taken: list[int]) -> None:
        pool = torch.arange(1000.0)
        torch.save({"x": pool[500:506].view(2, 3), "y": pool[::100], "z": pool[:1].expand(4)}, tmp_path / "a.pt")
        tensors, _ = open_tensors(tmp_path / "a.pt")
        assert tensors["x"].tolist() == [[500, 501, 502], [503, 504, 505]]
        assert sum(taken) == 24
        assert tensors["y"].tolist() == list(range(0, 1000, 100))
        assert tensors["z"].tolist() == [0] * 4

    def test_an_archive_that_someone_packed_again(self, tmp_path: Path) -> None:
        tensors = {name: torch.full((16,), float(name)) for name in ("1", "2", "3")}
        torch.save(tensors, tmp_path / "a.pt")
        with zipfile.ZipFile(tmp_path / "a.pt") as old:
            for name, kind, turn in (("b.pt", zipfile.ZIP_STORED, -1), ("c.pt", zipfile.ZIP_DEFLATED, 1)):
                with zipfile.ZipFile(tmp_path / name, "w", kind) as new:
                    for entry in old.infolist()[::turn]:
                        new.writestr(entry.filename, old.read(entry))
        for name in ("a.pt", "b.pt", "c.pt"):
            read, _ = read_tensors(tmp_path / name)
            assert {each: float(read[each].mean()) for each in read} == {"1": 1.0, "2": 2.0, "3": 3.0}

    def test_nothing_is_kept(self, tmp_path: Path) -> None:
        update = saved(tmp_path, "pt")
        tensor = update.gradients["0.weight"]
        gone = weakref.ref(tensor)
        update.verify()
        del tensor
        assert gone() is None

    def test_single_numbers_empty_tensors_and_small_formats(self, tmp_path: Path) -> None:
        odd = {"one": torch.tensor(3.0), "none": torch.zeros(0, 4), "small": torch.ones(3).to(torch.float8_e4m3fn)}
        save_file(odd, tmp_path / "a.safetensors")
        torch.save(odd, tmp_path / "a.pt")
        for name in ("a.safetensors", "a.pt"):
            tensors, _ = read_tensors(tmp_path / name)
            assert tensors["one"].shape == ()
            assert float(tensors["one"]) == 3
            assert tensors["none"].shape == (0, 4)
            assert tensors["small"].dtype == torch.float32
        numpy.savez(tmp_path / "a.npz", one=numpy.float32(3), none=numpy.zeros((0, 4)))
        tensors, _ = read_tensors(tmp_path / "a.npz")
        assert (float(tensors["one"]), tensors["none"].shape) == (3.0, (0, 4))

    def test_copies_and_what_was_read_do_without_the_file(self, tmp_path: Path) -> None:
        update = saved(tmp_path, "npz")
        others = [update.read(), copy.deepcopy(update), pickle.loads(pickle.dumps(update))]  # noqa: S301
        known = update.gradients["0.weight"]
        for file in tmp_path.iterdir():
            file.unlink()
        for each in others:
            assert torch.equal(each.gradients["0.weight"], known)
        with pytest.raises(DataError, match="cannot be read"):
            update.gradients["0.weight"]

    @pytest.mark.parametrize("kind", ["ours", "pt", "npz"])
    def test_an_audit_finds_what_it_finds_in_memory(self, tmp_path: Path, kind: str) -> None:
        known = spearpp.audit(ClientUpdate.from_weights(*sent(), lr=RATE), network())
        found = spearpp.audit(saved(tmp_path, kind), network())
        assert found.verdict is Verdict.LEAKS
        assert torch.equal(found.inputs, known.inputs)
        assert (found.caveats, found.replay) == (known.caveats, known.replay)


class TestTrouble:
    """Damage is one error, at the latest when the layer is read, and there is no report then."""

    @pytest.mark.parametrize("kind", ["safetensors", "pt", "npz", "old.pt"])
    @pytest.mark.parametrize("name", ["0.weight", "4.bias"])
    def test_numbers_that_are_none(self, tmp_path: Path, kind: str, name: str) -> None:
        before, after = sent()
        write(tmp_path / f"before.{kind}", before)
        after[name] = after[name].clone()
        after[name].view(-1)[-1] = torch.inf
        files = [str(tmp_path / "before") + f".{kind}", str(write(tmp_path / f"after.{kind}", after))]
        update = ClientUpdate.load(files[1], before=files[0])
        for look in (update.verify, lambda: spearpp.audit(update), lambda: update.gradients[name]):
            with pytest.raises(NonFiniteError, match=f"update: {name} holds NaN or Inf"):
                look()
        assert main(["audit", *files, "--out", str(tmp_path / "out")]) == 2
        assert not (tmp_path / "out").exists()

    def test_a_bit_that_fell_over_in_an_npz_file(self, tmp_path: Path) -> None:
        update = saved(tmp_path, "npz")
        file = tmp_path / "after.npz"
        content, stamp = bytearray(file.read_bytes()), file.stat().st_mtime_ns
        content[len(content) // 3] ^= 1
        file.write_bytes(content)
        os.utime(file, ns=(stamp, stamp))
        with pytest.raises(DataError, match="not a readable npz file"):
            update.verify()

    @pytest.mark.parametrize("kind", LAZY)
    @pytest.mark.parametrize(
        "change",
        [
            Path.unlink,
            lambda path: path.write_bytes(path.read_bytes()[:-50]),
            lambda path: os.utime(path, ns=(1, 1)),
        ],
        ids=["removed", "cut", "written"],
    )
    def test_a_file_that_changes_in_use(self, tmp_path: Path, kind: str, change: Callable[[Path], object]) -> None:
        update = saved(tmp_path, kind)
        update.verify()
        change(tmp_path / ("ours.safetensors" if kind == "ours" else f"after.{kind}"))
        with pytest.raises(DataError, match=r"cannot be read|was changed while it was in use"):
            update.gradients["0.weight"]

    @pytest.mark.parametrize("model", [None, network()])
    def test_a_file_that_goes_while_it_is_audited_leaves_no_half_result(
        self, tmp_path: Path, model: nn.Module | None
    ) -> None:
        update = saved(tmp_path, "safetensors" if model is None else "ours")

        def remove(*_: object) -> None:
            for file in tmp_path.iterdir():
                file.unlink()

        with pytest.raises(DataError, match="cannot be read"):
            spearpp.audit(update, model, progress=remove)


class TestMemory:
    def test_a_layer_that_is_too_large_is_skipped_and_said_to_be(self) -> None:
        update = ClientUpdate.from_weights(*sent(), lr=RATE)
        result = spearpp.audit(update, network(), memory=BYTES_PER_INVERTED_WEIGHT * 30 * 60)
        said = " ".join(result.caveats)
        assert result.verdict is Verdict.LEAKS
        assert "Layer 0: the gradient of the next layer was not used" in said
        assert "Layer 2 was skipped: inverting it takes about 152 KiB, more than the 91.4 KiB allowed" in said
        assert "raise memory= (--memory)" in said
        assert "No labels and no replay: running the model takes about" in said
        assert result.layers[1].reason.startswith("skipped:")
        nothing = spearpp.audit(update, network(), memory=1000)
        assert nothing.verdict is Verdict.NOT_APPLICABLE, "a gate does not open because memory is short"
        assert nothing.summary.startswith("NOT_APPLICABLE: no layer can be inverted (skipped:")
        assert not any("skipped" in each for each in spearpp.audit(update, network(), memory=None).caveats)

    def test_on_the_command_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        saved(tmp_path, "ours")
        cases = (("100K", 0, "Layer 2 was skipped"), ("1K", 3, "skipped:"), ("much", 2, "such as 512M"))
        for memory, code, said in cases:
            files = ["audit", str(tmp_path / "ours.safetensors"), "--memory", memory, "--out", str(tmp_path / "out")]
            assert main(files) == code
            assert said in " ".join("".join(capsys.readouterr()).split())

    @pytest.mark.parametrize("memory", [0, -1, True])
    def test_what_is_no_size(self, memory: int) -> None:
        with pytest.raises(OptionError, match="memory="):
            spearpp.audit(ClientUpdate.from_weights(*sent()), memory=memory)


LOOK = """
import sys
from pathlib import Path

import torch
from spearpp import ClientUpdate, check, find_layers


def peak():
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 1024


torch.linalg.eigh(torch.eye(300).double() @ torch.eye(300).double())  # what is loaded once
start = peak()
for kind in sys.argv[2:]:
    folder = Path(sys.argv[1])
    update = ClientUpdate.load(folder / f"after.{kind}", before=folder / f"before.{kind}", lr=0.1)
    check(update, find_layers(None, update))
print(peak() - start)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells the largest resident size")
def test_a_large_layer_is_never_in_memory_as_a_whole_while_it_is_checked(tmp_path: Path) -> None:
    """A layer of 16 million weights, 66 MB: eager reading takes three times that and more."""
    large = torch.arange(4100 * 4000.0).view(4100, 4000)
    before = {"0.weight": large, "0.bias": torch.rand(4100), "2.weight": torch.rand(10, 4100)}
    after = {name: 0.9 * each for name, each in before.items()}
    kinds = ("safetensors", "pt", "npz")
    for kind in kinds:
        write(tmp_path / f"before.{kind}", before)
        write(tmp_path / f"after.{kind}", after)
    package = str(Path(spearpp.__file__).parent.parent)
    assert float(python("-c", LOOK, tmp_path, *kinds, PYTHONPATH=package)) < 130
