"""Small layers and small networks use one thread, and the setting of the caller is restored."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import spearpp
from spearpp import auditing, simulate
from spearpp.auditing.plan import Plan, make_plan
from spearpp.linalg.chunks import MIN_ENTRIES_FOR_THREADS, single_thread_if_small


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
class TestThreads:
    def test_a_small_layer_is_searched_with_one(self) -> None:
        batch = simulate.random_batch(6, features=30, generator=torch.Generator().manual_seed(1))
        model = simulate.mlp(30, [90, 90], 10, generator=torch.Generator().manual_seed(2))
        used = []
        spearpp.invert(*simulate.fedsgd(model, batch)[0], progress=lambda _: used.append(torch.get_num_threads()))
        assert set(used) == {1}
        assert torch.get_num_threads() == 2

    def test_an_error_leaves_the_setting_as_it_was(self) -> None:
        with pytest.raises(ValueError, match="inside"), single_thread_if_small(10, torch.device("cpu")):
            raise ValueError("inside")
        assert torch.get_num_threads() == 2

    @pytest.mark.parametrize(("entries", "device"), [(MIN_ENTRIES_FOR_THREADS, "cpu"), (10, "cuda")])
    def test_large_layers_and_gpus_are_left_alone(self, entries: int, device: str) -> None:
        with single_thread_if_small(entries, torch.device(device)):
            assert torch.get_num_threads() == 2

    @pytest.mark.parametrize(
        ("first", "threads"),
        [([nn.Linear(36, 128)], 1), ([nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 8, 3), nn.Flatten()], 2)],
        ids=["linear", "convolution"],
    )
    def test_a_small_network_without_convolutions_is_audited_with_one(
        self, first: list[nn.Module], threads: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        used: list[int] = []

        def spy(*arguments: Any) -> Plan:
            used.append(torch.get_num_threads())
            return make_plan(*arguments)

        monkeypatch.setattr(auditing, "make_plan", spy)
        model = nn.Sequential(*first, nn.ReLU(), nn.Linear(128, 10))
        batch = simulate.random_batch(4, features=36, generator=torch.Generator().manual_seed(1))
        spearpp.audit(simulate.FedSGD()(model, batch), model)
        assert used == [threads]
        assert torch.get_num_threads() == 2
