"""The vocabulary of a client: rows of embedding tables that the training looked up, and nothing else."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import spearpp
from spearpp import report
from spearpp.auditing.vocabulary import Vocabulary, audit_vocabulary
from spearpp.auditing.vocabulary.rows import _threshold
from spearpp.cli import main
from spearpp.errors import DataError, MissingExtraError, OptionError
from spearpp.model.embeddings import find_tables
from spearpp.types import Tensor
from spearpp.update import ClientUpdate
from spearpp.words import read_words

ROWS, WIDTH, STEPS = 400, 16, 10
Optimiser = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    """A classifier of short texts."""

    def __init__(self, bag: bool = False, tied: str = "", **options: Any) -> None:
        super().__init__()
        self.tokens: nn.Module = (nn.EmbeddingBag if bag else nn.Embedding)(ROWS, WIDTH, **options)
        self.bag, self.tied = bag, tied
        self.output = nn.Linear(WIDTH, ROWS if tied else 2, bias=not tied)
        if tied == "module":
            self.output.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.tied == "branch" and bool((x < 0).any()):  # cannot be traced
            raise ValueError("negative tokens")
        features = torch.tanh(self.tokens(x) if self.bag else self.tokens(x).mean(1))
        if self.tied in ("functional", "branch"):
            return functional.linear(features, self.get_parameter("tokens.weight"))
        return self.output(features)


class Branch(Net):
    """A classifier that cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if bool((x >= 0).all()) else -x)


def train(
    model: nn.Module,
    optimiser: Optimiser,
    *,
    dtype: torch.dtype = torch.float32,
    penalty: Callable[[Tensor], Tensor] | None = None,
    noise: float = 0.0,
) -> tuple[ClientUpdate, set[int]]:
    """Train for a few steps, and return the update and the tokens of the client."""
    table = model.get_parameter("tokens.weight")
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(each.to(dtype))
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    step, seen = optimiser(list(model.parameters())), set[int]()
    for _ in range(STEPS):
        tokens = torch.randint(0, ROWS // 2, (4, 6)) * 2 + 1
        seen |= set(tokens.flatten().tolist())
        step.zero_grad()
        loss = functional.cross_entropy(model(tokens), torch.randint(0, 2, (4,)))
        (loss if penalty is None else loss + penalty(table)).backward()
        for each in model.parameters():
            if noise and each.grad is not None:
                each.grad += noise * torch.randn_like(each)
        step.step()
    after = {name: each.detach().to(dtype) for name, each in model.named_parameters()}
    return ClientUpdate.from_weights(before, after), seen


def found(model: nn.Module, update: ClientUpdate) -> Vocabulary:
    return audit_vocabulary(update, find_tables(model, update))[0]


OPTIMISERS: dict[str, Optimiser] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.5),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "momentum and decay": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, 1e-3),
    "adam with L2": lambda p: torch.optim.Adam(p, 1e-3, weight_decay=1e-5),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-3),
    "adamw with strong decay": lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=1.0),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_every_token_of_the_client_is_named_and_no_other(name: str) -> None:
    torch.manual_seed(0)
    model = Net()
    update, seen = train(model, OPTIMISERS[name])
    assert set(found(model, update).used) == seen


@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_checkpoints(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Net()
    update, seen = train(model, lambda p: OPTIMISERS[name]([{"params": p, "lr": 1e-2}]), dtype=dtype)
    used = set(found(model, update).used)
    assert used <= seen
    assert len(used) >= 0.9 * len(seen)


@pytest.mark.parametrize(
    "options", [{"bag": True}, {"padding_idx": 1}, {"max_norm": 2.0}, {"scale_grad_by_freq": True}]
)
def test_kinds_of_tables(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Net(**options)
    update, seen = train(model, OPTIMISERS["sgd"])
    assert set(found(model, update).used) == seen - {options.get("padding_idx")}


def test_sparse_gradients() -> None:
    model = Net(sparse=True)
    tokens = torch.tensor([[3, 5, 7], [5, 300, 301]])
    functional.cross_entropy(model(tokens), torch.tensor([0, 1])).backward()
    assert found(model, ClientUpdate.from_gradients(model)).used == (3, 5, 7, 300, 301)


@pytest.mark.parametrize("penalty", [lambda w: 1e-3 * w.square().sum(), lambda w: 1e-3 * w.norm()])
def test_a_penalty_in_the_loss_of_a_gradient(penalty: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Net()
    tokens = torch.tensor([[3, 5, 7], [5, 300, 301]])
    table = model.get_parameter("tokens.weight")
    (functional.cross_entropy(model(tokens), torch.tensor([0, 1])) + penalty(table)).backward()
    update = ClientUpdate.from_gradients(model)
    result = found(model, update)
    assert result.used == (3, 5, 7, 300, 301)
    assert "weight decay" in result.reason


@pytest.mark.parametrize(
    "options",
    [
        {"noise": 1e-3},
        {"noise": 1e-7},
        {"noise": 1e-3, "dtype": torch.bfloat16},
        {"penalty": lambda w: 1e-3 * (w.T @ w - torch.eye(WIDTH)).square().sum()},
    ],
)
def test_nothing_is_claimed_if_something_moves_every_row(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Net()
    update, seen = train(model, OPTIMISERS["sgd"], **options)
    result = found(model, update)
    assert set(result.used) <= seen
    assert result.count == 0
    assert "moves every row" in result.reason


@pytest.mark.parametrize(
    ("name", "penalty"),
    [
        ("sgd", lambda w: 1e-3 * (w[:200].square().sum() + 3 * w[200:].square().sum())),
        ("sgd", lambda w: 1e-3 * w[8:].square().sum()),
        ("sgd", lambda w: 1e-3 * functional.huber_loss(w, torch.zeros_like(w), reduction="sum", delta=2.0)),
        ("adam", lambda w: 1e-5 * (w[:200].square().sum() + 1e-3 * w[200:].square().sum())),
    ],
    ids=["two rates", "without the first rows", "Huber", "two rates with Adam"],
)
def test_rows_that_a_regulariser_moves_differently_are_no_tokens(
    name: str, penalty: Callable[[Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    model = Net()
    update, seen = train(model, OPTIMISERS[name], penalty=penalty)
    assert set(found(model, update).used) <= seen


def test_noise_that_rounding_hides_is_no_token() -> None:
    torch.manual_seed(0)
    model = Net()
    for noise in (1e-6, 1e-5, 1e-4):
        update, seen = train(model, OPTIMISERS["sgd"], noise=noise, dtype=torch.bfloat16)
        assert set(found(model, update).used) <= seen


def test_a_decay_below_rounding_is_no_token() -> None:
    """With three columns, a decay of half a unit of rounding moves some rows and leaves others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(2000, 3), nn.Flatten(), nn.Linear(6, 2))
    after = {name: each.detach().clone() for name, each in model.named_parameters()}
    for _ in range(20):
        after["0.weight"] = (after["0.weight"].double() * (1 - 4e-8)).float()
    still = torch.eq(after["0.weight"], model.get_parameter("0.weight")).all(1)
    assert 0 < int(still.sum()) < 2000
    assert found(model, ClientUpdate.from_weights(model, after)).count == 0


@pytest.mark.parametrize("kind", [Net, Branch])
@pytest.mark.parametrize("tied", ["module", "functional"])
def test_tied_weights_are_recognised(kind: type[Net], tied: str) -> None:
    torch.manual_seed(0)
    model = kind(tied=tied)
    update, _ = train(model, OPTIMISERS["sgd"], dtype=torch.bfloat16)
    result = found(model, update)
    assert result.count == 0
    assert "tied" in result.reason


def test_a_model_that_cannot_be_traced_is_run_on_tokens() -> None:
    torch.manual_seed(0)
    model = Branch()
    update, seen = train(model, OPTIMISERS["sgd"])
    assert set(found(model, update).used) == seen


def test_a_model_that_can_neither_be_traced_nor_run() -> None:
    class Strange(Net):
        def forward(self, x: Tensor) -> Tensor:
            if len(x[0]) != 99:
                raise ValueError("every text must have 99 tokens")
            return super().forward(x)

    model = Strange()
    update = ClientUpdate.from_gradients(model, [torch.ones_like(each) for each in model.parameters()])
    assert "neither be traced nor run" in found(model, update).reason


def test_a_frozen_table_reveals_nothing() -> None:
    torch.manual_seed(0)
    model = Net()
    model.get_parameter("tokens.weight").requires_grad_(False)
    update, _ = train(model, lambda p: torch.optim.SGD([each for each in p if each.requires_grad], 0.1))
    assert "frozen" in found(model, update).reason


def test_positions_are_not_a_vocabulary() -> None:
    model = Net()
    functional.cross_entropy(model(torch.arange(12).reshape(2, 6)), torch.tensor([0, 1])).backward()
    update = ClientUpdate.from_gradients(model)
    result = spearpp.audit(update, model)
    assert result.vocabulary[0].count == 12
    assert result.vocabulary[0].positions
    assert "vocabulary" not in result.summary


def test_a_threshold_needs_a_gap() -> None:
    close = torch.linspace(1, 2, 50).double()
    assert _threshold(torch.cat([close, 100 * close]), 0.5, 10.0, 8) == 8.0
    assert _threshold(torch.logspace(0, 3, 100).double(), 0.5, 10.0, 8) is None


@pytest.fixture
def leak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, ClientUpdate, set[int]]:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = Net()
    update, seen = train(model, OPTIMISERS["adamw"])
    return model, update, seen


@pytest.mark.parametrize("redact", ["none", "blur", "omit"])
def test_the_report_names_the_words_unless_redacted(
    leak: tuple[nn.Module, ClientUpdate, set[int]], redact: report.Redaction
) -> None:
    model, update, seen = leak
    result = spearpp.audit(update, model, vocabulary=[f"secret{row}" for row in range(ROWS)])
    assert result.verdict == "LEAKS"
    assert "vocabulary of this client, but no inputs" in result.summary
    assert result.vocabulary[0].words == tuple(f"secret{row}" for row in sorted(seen))
    page = report.write("out", result, redact=redact).read_text()
    assert "Vocabulary of this client" in page
    for file in Path("out").iterdir():
        named = b"secret" in file.read_bytes()
        assert named == (redact == "none" and file.name in ("report.html", "report.json"))
    content = json.loads(Path("out/report.json").read_text())
    assert content["vocabulary"][0]["count"] == len(seen)
    assert content["vocabulary"][0]["used"] == (sorted(seen) if redact == "none" else [])
    sarif = json.loads(Path("out/report.sarif").read_text())["runs"][0]["results"]
    assert [each["ruleId"] for each in sarif] == ["spearpp/vocabulary"]
    loaded = spearpp.AuditResult.load("out")
    assert loaded.vocabulary == (result if redact == "none" else loaded).vocabulary
    assert loaded.vocabulary[0].leaks


MODEL = """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.output = nn.Embedding(400, 16), nn.Linear(16, 2)
    def forward(self, x):
        return self.output(self.tokens(x).mean(1).tanh())
"""


def test_the_command_line(leak: tuple[nn.Module, ClientUpdate, set[int]], capsys: pytest.CaptureFixture[str]) -> None:
    leak[1].save("client.safetensors")
    Path("net.py").write_text(MODEL)
    Path("words.txt").write_text("".join(f"word{row}\n" for row in range(ROWS)))
    command = ["audit", "client.safetensors", "--model", "net.py:Net", "--out", "out", "--fail-on", "certified"]
    assert main([*command, "--vocabulary", "words.txt"]) == 1
    assert f"word{min(leak[2])}" in capsys.readouterr().out
    assert main([*command, "--vocabulary", "tokens=words.txt"]) == 1
    Path("words.txt").write_text("".join(f"word{row}\n" for row in range(ROWS + 1)))
    for bad in ("words.txt", "tokens=words.txt", "nothing=words.txt", "missing.txt", "=words.txt"):
        assert main([*command, "--vocabulary", bad]) == 2
    assert main(["audit", "client.safetensors", "--vocabulary", "words.txt"]) == 2


def test_several_rounds_reveal_the_rows_of_all_rounds() -> None:
    torch.manual_seed(0)
    model = Net()
    updates, seen = zip(*(train(model, OPTIMISERS["sgd"]) for _ in range(2)), strict=True)
    assert seen[0] != seen[1]
    result = spearpp.audit(list(updates), model, vocabulary=[f"word{row}" for row in range(ROWS)])
    assert result.verdict == "LEAKS"
    assert result.vocabulary[0].words == tuple(f"word{row}" for row in sorted(seen[0] | seen[1]))
    assert f"{len(seen[0] | seen[1])} of {ROWS} rows" in result.summary
    with pytest.raises(OptionError, match="no embedding table fits"):
        spearpp.audit(list(updates), model, vocabulary=["word"] * (ROWS + 1))


def test_words_from_files(tmp_path: Path) -> None:
    file = tmp_path / "words.json"
    for content in ("{", "[1, 2]", "{}", "[]", '{"a": 1}'):
        file.write_text(content)
        with pytest.raises(DataError):
            read_words(file)
    text = tmp_path / "words.txt"
    text.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError):
        read_words(text)


TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"red": 0, "green": 1, "blue": 2}, "unk_token": "red"},
}


def test_words_from_a_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(TOKENIZER))
    try:
        import tokenizers  # noqa: F401
    except ImportError:
        with pytest.raises(MissingExtraError, match=r"spearpp\[text\]"):
            read_words(file)
        return
    assert read_words(file) == ["red", "green", "blue"]


def test_words_must_fit_one_table() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(5, 4), "b": nn.Embedding(5, 4)})
    update = ClientUpdate.from_gradients(model, [torch.ones(5, 4), torch.ones(5, 4)])
    tables = find_tables(model, update)
    with pytest.raises(OptionError, match="2 embedding tables fit"):
        audit_vocabulary(update, tables, ["x"] * 5)
    with pytest.raises(OptionError, match="no embedding table fits"):
        audit_vocabulary(update, tables, ["x"] * 6)
