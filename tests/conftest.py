"""Checks annotated types and shapes (``checking``), and offers small clients that carry their own answer."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from jaxtyping import install_import_hook

import checking
import forking

with install_import_hook("spearpp", "checking.check"):
    import spearpp

    for name in spearpp.__all__:  # every name is imported when it is first used
        getattr(spearpp, name)

import pytest
import torch
from hypothesis import settings
from torch import nn

from clients import weighted
from spearpp import simulate
from spearpp.inversion.observation import observe
from spearpp.inversion.problem import Problem, pose
from spearpp.inversion.result import Inversion
from spearpp.linalg import sphere
from spearpp.metrics import Score
from spearpp.simulate import Batch, LayerGradient

# Small problems on shared cores: more threads only wait for each other, in what tests start as well.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell that runs the suite in the background has it ignore Ctrl-C, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The machines are noisy: no test depends on how long an example takes.
settings.register_profile("noisy", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("noisy")


def pytest_runtest_setup() -> None:
    checking.CALLS.clear()


def true_points(problem: Problem, batch: Batch) -> torch.Tensor:
    """Q⁻¹, one p a row, from the inputs: X̂ᵀ = Q⁻¹ R."""
    inputs = batch.inputs.double()
    if problem.seen.has_bias:
        inputs = torch.cat([inputs, torch.ones(len(inputs), 1, dtype=inputs.dtype)], dim=1)
    return inputs @ torch.linalg.pinv(problem.factors.right)


def true_directions(problem: Problem, batch: Batch) -> torch.Tensor:
    """The unit q_i, one a row."""
    return sphere.retract(torch.linalg.inv(true_points(problem, batch)).T)


@dataclass(frozen=True)
class Client:
    """A batch, what the server sees of it, and the truth about Q."""

    batch: Batch
    seen: LayerGradient

    @property
    def problem(self) -> Problem:
        return pose(observe(*self.seen))

    @property
    def grad_bias(self) -> torch.Tensor:
        assert self.seen.grad_bias is not None
        return self.seen.grad_bias.double()

    @property
    def preactivations(self) -> torch.Tensor:
        """Z, one sample a row, in float64."""
        assert self.seen.bias is not None
        return self.batch.inputs.double() @ self.seen.weight.double().T + self.seen.bias.double()

    def true_directions(self, problem: Problem) -> torch.Tensor:
        return true_directions(problem, self.batch)

    @property
    def columns_of_d(self) -> torch.Tensor:
        """dL/dz, one sample a row: what its inputs leave of the gradient, D = Ĝ X̂⁺."""
        inputs = torch.cat([self.batch.inputs.double(), torch.ones(len(self.batch.inputs), 1).double()], dim=1)
        seen = torch.cat([self.seen.grad_weight.double(), self.grad_bias[:, None]], dim=1)
        return (seen @ torch.linalg.pinv(inputs)).T

    def score(self, result: Inversion) -> Score:
        return spearpp.score(result.inputs, self.batch.inputs, normalisation=self.batch.normalisation)


MakeClient = Callable[..., Client]
Value = TypeVar("Value")


def present(value: Value | None) -> Value:
    """Return a value that must not be None."""
    assert value is not None
    return value


def batch_and_model(
    b: int, features: int, hidden: list[int], *, seed: int = 0, bias: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[Batch, nn.Sequential]:
    """A batch of random inputs and a network of ten classes, drawn from one generator."""
    generator = torch.Generator().manual_seed(seed)
    batch = simulate.random_batch(b, features=features, generator=generator)
    return batch, simulate.mlp(features, hidden, 10, bias=bias, generator=generator, dtype=dtype)


@pytest.fixture(scope="session")
def make_client() -> MakeClient:
    def make(
        b: int = 6,
        m: int = 80,
        n: int = 40,
        *,
        seed: int = 0,
        depth: int = 2,
        bias: bool = True,
        dtype: torch.dtype = torch.float32,
        batch: Batch | None = None,
        layer: int = 0,
    ) -> Client:
        generator = torch.Generator().manual_seed(seed)
        batch = batch or simulate.random_batch(b, features=n, generator=generator)
        model = simulate.mlp(batch.inputs.shape[1], [m] * depth, 10, bias=bias, generator=generator, dtype=dtype)
        return Client(batch, simulate.fedsgd(model, batch)[layer])

    return make


def graded(
    importance: torch.Tensor, m: int, n: int, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Batch, list[LayerGradient]]:
    """Two layers of a client whose samples count unequally, as those do that a network is more or less sure of."""
    batch, model = batch_and_model(len(importance), n, [m, m], seed=seed, dtype=dtype)
    return batch, weighted(model, batch, importance)[:2]


@pytest.fixture(scope="module")
def nothing() -> spearpp.AuditResult:
    """An audit that cannot be applied, because of Dropout behind an activation other than ReLU."""
    model = nn.Sequential(nn.Linear(30, 60), nn.GELU(), nn.Dropout(0.5), nn.Linear(60, 4))
    return spearpp.audit(simulate.FedSGD()(model, simulate.random_batch(5, features=30, classes=4)), model)


@pytest.fixture(scope="session")
def cifar_path() -> Path:
    """CIFAR-10 from SPEARPP_DATA or the folder beside the checkout; skipped where there is none."""
    places = [os.environ.get("SPEARPP_DATA", ""), str(Path(__file__).parents[2] / "shared" / "data")]
    for place in places:
        file = Path(place) / "cifar10_test.npz" if Path(place).is_dir() else Path(place)
        if place and file.is_file():
            return file
    pytest.skip("no CIFAR-10: set SPEARPP_DATA to the npz file")


@pytest.fixture(scope="session")
def forking_server() -> Iterator[str]:
    """The socket of a process that runs commands and audits in forks, without importing torch each time."""
    with forking.serving() as place:
        yield place


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")
