"""Updates are read completely or rejected, from every format, and no code in a file is executed."""

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opacus import GradSampleModule
from safetensors.torch import save_file
from torch import nn

from spearpp import ClientUpdate, SpearError, simulate
from spearpp.errors import DataError, NonFiniteError, OptionError, ShapeError
from spearpp.update import files
from spearpp.update.files import read_tensors
from spearpp.update.readers import HEADER

FIELDS = st.sampled_from(["format", "kind", "lr", "steps", "clients", "order", "buffers"])
HEADERS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner),
    max_leaves=6,
)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def trained(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach() - 0.1 * (index + 1) for index, (name, each) in enumerate(net.named_parameters())}


def save_npz(path: Path, arrays: dict[str, numpy.ndarray] | list[numpy.ndarray]) -> None:
    """As numpy.savez has it: a list becomes arr_0, arr_1, …"""
    named = arrays if isinstance(arrays, dict) else {f"arr_{i}": each for i, each in enumerate(arrays)}
    with zipfile.ZipFile(path, "w") as archive:
        for name, each in named.items():
            with archive.open(f"{name}.npy", "w") as file:
                numpy.lib.format.write_array(file, each)


class TestSources:
    def test_gradients_by_name_in_order_and_off_the_model(self) -> None:
        net = model()
        net(torch.randn(4, 6)).logsumexp(1).mean().backward()
        named = {name: each.grad for name, each in net.named_parameters() if each.grad is not None}
        grads = list(named.values())
        for update in (
            ClientUpdate.from_gradients(net),
            ClientUpdate.from_gradients(net, grads),
            ClientUpdate.from_gradients(net, named),
            ClientUpdate.from_gradients(net.state_dict(), grads),
        ):
            assert update.gradients.keys() == dict(net.named_parameters()).keys()
            torch.testing.assert_close(update.gradients["0.weight"], named["0.weight"])
        with torch.no_grad():
            for each in net.parameters():
                each.zero_()
        assert bool(update.weights["0.weight"].any()), "the weights must be those that were sent"

    def test_weights_and_deltas_are_the_gradient_times_the_rate(self) -> None:
        net = model()
        after = trained(net)
        deltas = {name: after[name] - each.detach() for name, each in net.named_parameters()}
        for update in (
            ClientUpdate.from_weights(net, after, lr=0.1),
            ClientUpdate.from_weights(list(net.parameters()), list(after.values()), lr=0.05, steps=2),
            ClientUpdate.from_weights(net, deltas, lr=0.1, deltas=True),
        ):
            for index, each in enumerate(update.gradients.values()):
                torch.testing.assert_close(each, torch.full_like(each, index + 1.0))

    def test_wrapped_names_are_the_same_names(self) -> None:
        net = model()
        after = trained(net)
        plain = ClientUpdate.from_weights(net, after)
        for prefix in ("module.", "_module.", "_module.module."):
            wrapped = ClientUpdate.from_weights(net.state_dict(), {prefix + name: each for name, each in after.items()})
            torch.testing.assert_close(wrapped.gradients, plain.gradients)
        opacus = GradSampleModule(model())
        torch.testing.assert_close(ClientUpdate.from_weights(opacus, after).gradients, plain.gradients)

    def test_running_statistics_are_set_aside(self) -> None:
        net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU())
        update = ClientUpdate.from_weights(net.state_dict(), {n: e + 1 for n, e in net.state_dict().items()})
        assert set(update.gradients) == {"0.weight", "0.bias", "1.weight", "1.bias"}
        assert len(update.buffers) == 3

    def test_a_sum_is_a_sum_on_the_same_weights_only(self) -> None:
        net = model()
        one = ClientUpdate.from_weights(net, trained(net), lr=0.1)
        two = ClientUpdate.from_weights(net, {n: 2 * each for n, each in trained(net).items()}, lr=0.1)
        both = ClientUpdate.sum([one, two])
        assert both.clients == 2
        torch.testing.assert_close(both.gradients["2.bias"], one.gradients["2.bias"] + two.gradients["2.bias"])
        stranger = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
        other = ClientUpdate.from_weights(stranger, trained(net), lr=0.1)
        with pytest.raises(DataError, match="not computed on the same weights"):
            ClientUpdate.sum([one, other])
        with pytest.raises(OptionError):
            ClientUpdate.sum([])
        with pytest.raises(DataError, match="no common scale"):
            ClientUpdate.sum([one, ClientUpdate.from_weights(net, trained(net), lr=0.2)])

    def test_it_is_a_copy(self) -> None:
        net = model()
        net(torch.randn(4, 6)).sum().backward()
        update = ClientUpdate.from_gradients(net)
        net.zero_grad(set_to_none=False)
        assert bool(update.gradients["0.bias"].any())

    def test_lists_with_gaps_keep_their_places(self) -> None:
        net = model()
        grads = [torch.full_like(each, index) for index, each in enumerate(net.parameters())]
        update = ClientUpdate.from_gradients(net, [None, *grads[1:]])
        assert list(update.gradients) == ["0.bias", "2.weight", "2.bias"]
        assert float(update.gradients["2.bias"][0]) == 3
        with pytest.raises(DataError, match="3 tensors"):
            ClientUpdate.from_gradients(net, [None, *grads[1:3]])

    def test_sparse_gradients_tied_weights_and_own_buffers(self) -> None:
        net = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        net[1].weight = net[0].weight
        net.register_buffer("positions", torch.ones(3))
        update = ClientUpdate.from_weights(net, {name: each + 1 for name, each in net.state_dict().items()})
        assert list(update.gradients) == ["0.weight", "0.bias", "1.bias"]
        sparse = ClientUpdate.from_gradients(net, {"0.weight": torch.eye(5).to_sparse()})
        assert sparse.gradients["0.weight"].layout is torch.strided

    @pytest.mark.parametrize(
        "odd",
        [
            {"0.bias": torch.zeros(5, device="meta")},
            {"0.bias": torch.zeros(5, dtype=torch.complex64)},
        ],
    )
    def test_what_holds_no_numbers(self, odd: dict[str, torch.Tensor]) -> None:
        with pytest.raises(DataError):
            ClientUpdate.from_weights(model(), odd)

    @pytest.mark.parametrize(
        ("change", "error", "match"),
        [
            (lambda after: {**after, "0.weight": torch.zeros(5, 7)}, ShapeError, r"0.weight has shape \(5, 7\)"),
            (lambda after: {**after, "9.weight": torch.zeros(2)}, DataError, "'9.weight'"),
            (lambda after: {**after, "0.bias": torch.full((5,), torch.nan)}, NonFiniteError, "0.bias holds NaN"),
            (lambda after: {**after, "0.bias": "text"}, DataError, "is a str"),
            (lambda _after: {}, DataError, "holds no gradient"),
            (lambda after: list(after.values())[:3], DataError, "3 tensors, the model has 4"),
            (lambda after: {**after, "module.0.bias": torch.zeros(5)}, DataError, "the same without the prefixes"),
        ],
    )
    def test_what_does_not_fit_is_one_clear_error(
        self, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], error: type[Exception], match: str
    ) -> None:
        net = model()
        with pytest.raises(error, match=match):
            ClientUpdate.from_weights(net, change(trained(net)))

    def test_options_out_of_range(self) -> None:
        net = model()
        for lr, steps in ((0.0, None), (-1.0, None), (float("nan"), None), (0.1, 0)):
            with pytest.raises(OptionError):
                ClientUpdate.from_weights(net, trained(net), lr=lr, steps=steps)
        with pytest.raises(DataError, match="no gradients"):
            ClientUpdate.from_gradients(net)


class TestFiles:
    def test_saved_and_loaded_it_is_the_same(self, tmp_path: Path) -> None:
        net = model()
        update = ClientUpdate.from_weights(net, trained(net), lr=0.1, steps=3)
        update.save(tmp_path / "client.safetensors")
        back = ClientUpdate.load(tmp_path / "client.safetensors")
        assert repr(back) == repr(update)
        assert list(back.weights) == list(update.weights)
        torch.testing.assert_close(back.gradients, update.gradients, rtol=0, atol=0)
        assert back.threat_model == update.threat_model
        assert [path.name for path in tmp_path.iterdir()] == ["client.safetensors"]

    def test_the_weights_before_may_come_from_our_own_file(self, tmp_path: Path) -> None:
        net = model()
        ClientUpdate.from_weights(net, trained(net)).save(tmp_path / "last.safetensors")
        torch.save(trained(net), tmp_path / "after.pt")
        update = ClientUpdate.load(tmp_path / "after.pt", before=tmp_path / "last.safetensors", lr=0.1)
        torch.testing.assert_close(update.weights, {name: each.detach() for name, each in net.named_parameters()})

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_other_precisions(self, tmp_path: Path, dtype: torch.dtype) -> None:
        net = model()
        update = simulate.Cast(dtype)(ClientUpdate.from_weights(net, trained(net)))
        update.save(tmp_path / "a.safetensors")
        assert ClientUpdate.load(tmp_path / "a.safetensors").gradients["0.weight"].dtype == dtype

    @pytest.mark.parametrize("kind", ["pt", "wrapped.pth", "list.pt", "npz", "list.npz", "safetensors"])
    def test_files_of_others(self, tmp_path: Path, kind: str) -> None:
        net = model()
        after, path = trained(net), tmp_path / f"after.{kind}"
        if kind.endswith("npz"):
            arrays = {name: each.numpy() for name, each in after.items()}
            save_npz(path, list(arrays.values()) if "list" in kind else arrays)
        elif kind == "safetensors":
            save_file(after, path)
        else:
            content = {"pt": after, "wrapped.pth": {"epoch": 3, "state_dict": after}, "list.pt": list(after.values())}
            torch.save(content[kind], path)
        update = ClientUpdate.load(path, before=net, lr=0.1)
        torch.testing.assert_close(update.gradients, ClientUpdate.from_weights(net, after, lr=0.1).gradients)
        torch.save(net.state_dict(), tmp_path / "before.pt")
        again = ClientUpdate.load(path, before=tmp_path / "before.pt", lr=0.1)
        torch.testing.assert_close(again.gradients, update.gradients)
        with pytest.raises(OptionError, match="a second file is needed"):
            ClientUpdate.load(path)

    def test_nothing_is_left_where_nothing_can_be_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        update = ClientUpdate.from_weights(model(), trained(model()))
        with pytest.raises(DataError, match="cannot be written"):
            update.save(tmp_path / "missing" / "a.safetensors")

        def full(_descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        (tmp_path / "a.safetensors").write_bytes(b"old")
        with pytest.raises(DataError, match="No space left"):
            update.save(tmp_path / "a.safetensors")
        assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a.safetensors", b"old")]


class Bomb:
    """A pickle that would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (Path.touch, (self.path,))


class TestHostileFiles:
    @pytest.mark.parametrize("suffix", [".pt", ".npz"])
    def test_a_pickle_with_code_is_not_run(self, tmp_path: Path, suffix: str) -> None:
        victim, path = tmp_path / "owned", tmp_path / f"a{suffix}"
        if suffix == ".pt":
            torch.save({"0.weight": torch.zeros(2), "bomb": Bomb(victim)}, path)
        else:
            numpy.savez(path, bomb=numpy.array([Bomb(victim)], dtype=object))
        with pytest.raises(DataError, match=r"holds more than tensors|can run code and are not loaded"):
            read_tensors(path)
        path.with_suffix(".pth").write_bytes(pickle.dumps(Bomb(victim)))
        with pytest.raises(DataError):
            read_tensors(path.with_suffix(".pth"))
        assert not victim.exists()

    def test_a_header_that_claims_a_terabyte(self, tmp_path: Path) -> None:
        path = tmp_path / "a.safetensors"
        path.write_bytes(struct.pack("<Q", 10**12) + b"{}")
        with pytest.raises(DataError):
            read_tensors(path)
        header = json.dumps({"x": {"dtype": "F32", "shape": [10**6, 250_000], "data_offsets": [0, 10**12]}}).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header + b"1234")
        with pytest.raises(DataError):
            read_tensors(path)

    def test_a_tensor_without_strides_claims_a_terabyte(self, tmp_path: Path) -> None:
        torch.save({"x": torch.zeros(1).expand(10**6, 10**6)}, tmp_path / "a.pt")
        with pytest.raises(DataError, match="more than the"):
            read_tensors(tmp_path / "a.pt")

    def test_an_archive_that_unpacks_to_too_much(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a/data.pkl", b"0" * 10**6)
        monkeypatch.setattr(files, "LARGEST", 10**5)
        with pytest.raises(DataError, match="unpacks to"):
            read_tensors(tmp_path / "a.pt", largest=10**5)

    def test_a_small_pickle_that_asks_for_gigabytes(self, tmp_path: Path) -> None:
        torch.save({"x": torch.zeros(2), "y": bytearray(10)}, tmp_path / "a.pt")
        with pytest.raises(DataError, match="more than tensors"):
            read_tensors(tmp_path / "a.pt")

    def test_a_checkpoint_that_holds_itself(self, tmp_path: Path) -> None:
        content: dict[str, object] = {"epoch": 1}
        content["state_dict"] = content
        torch.save(content, tmp_path / "a.pt")
        with pytest.raises(DataError, match="without tensors"):
            read_tensors(tmp_path / "a.pt")

    def test_numbers_of_the_other_byte_order(self, tmp_path: Path) -> None:
        save_npz(tmp_path / "a.npz", {"x": numpy.arange(3, dtype=">f4")})
        assert read_tensors(tmp_path / "a.npz")[0]["x"].tolist() == [0, 1, 2]

    def test_names_that_are_none(self, tmp_path: Path) -> None:
        with pytest.raises(DataError):
            read_tensors("a\0b.pt")
        with pytest.raises(OptionError, match="is written as"):
            ClientUpdate.from_weights(model(), trained(model())).save(tmp_path / "a.pt")

    @pytest.mark.parametrize("name", ["a.txt", "missing.pt", ".", "folder.pt"])
    def test_what_is_no_file_of_tensors(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "folder.pt").mkdir()
        (tmp_path / "a.txt").write_text("hello")
        with pytest.raises(DataError):
            read_tensors(tmp_path / name)

    @pytest.mark.parametrize("suffix", ["safetensors", "pt", "npz"])
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=120)
    @given(data=st.data())
    def test_damaged_files(self, tmp_path: Path, suffix: str, data: st.DataObject) -> None:
        """Cut, or with bytes changed: the right tensors or one clear error."""
        net, whole = model(), tmp_path / f"whole.{suffix}"
        if suffix == "safetensors":
            ClientUpdate.from_weights(net, trained(net)).save(whole)
        elif suffix == "pt":
            torch.save(trained(net), whole)
        else:
            save_npz(whole, {name: each.numpy() for name, each in trained(net).items()})
        content = bytearray(whole.read_bytes())
        for place in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=4)):
            content[place] = data.draw(st.integers(0, 255))
        del content[data.draw(st.integers(0, len(content))) :]
        damaged = tmp_path / f"damaged.{suffix}"
        damaged.write_bytes(content)
        before = set(tmp_path.iterdir())
        with suppress(SpearError):
            ClientUpdate.load(damaged, before=net).verify()
        assert set(tmp_path.iterdir()) == before

    @given(header=HEADERS)
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
    def test_headers_that_are_none(self, tmp_path: Path, header: object) -> None:
        net, path = model(), tmp_path / "a.safetensors"
        tensors = {f"weights/{name}": each for name, each in net.state_dict().items()}
        save_file(tensors | {"gradients/0.bias": torch.ones(5)}, path, {HEADER: json.dumps(header)})
        with suppress(SpearError):
            assert isinstance(ClientUpdate.load(path, before=net), ClientUpdate)
