"""Networks of well-known federated-learning projects, as small definitions of our own.

The layer sizes are those of the originals. The weights are random, with PyTorch's initialisation. ``ZOO`` lists the
networks with the shape of one input and the kind of their data.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from spearpp.simulate.backbones import Frozen
from spearpp.types import Tensor

ADULT_CATEGORIES = (9, 16, 7, 15, 6, 5, 2, 42)
"""Numbers of categories of the eight categorical columns of the Adult census data."""


@dataclass(frozen=True)
class Network:
    """One network of the zoo."""

    name: str
    origin: str
    """Which project uses a network with these layer sizes."""
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Shape of one input. For tokens, the length of a text."""
    data: str
    """Kind of data: pictures, table, tokens, bags of features, or categories beside numbers."""


class Recurrent(nn.Module):
    """Embedding, LSTM and an output layer that reads the last state, or the state after every token."""

    def __init__(self, rows: int, width: int, hidden: int, layers: int, outputs: int, narrow: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, width)
        self.lstm = nn.LSTM(width, hidden, layers, batch_first=True)
        self.narrow = nn.Linear(hidden, narrow) if narrow else None
        self.output = nn.Linear(narrow or hidden, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return (batch, outputs), or (batch, outputs, tokens) for a model that predicts every next token."""
        states, _ = self.lstm(self.embedding(tokens))
        if self.narrow is None:
            last: Tensor = self.output(states[:, -1])
            return last
        every: Tensor = self.output(self.narrow(states))
        return every.transpose(1, 2)


class Bert(nn.Module):
    """Encoder of BERT: embeddings of tokens and positions, LayerNorm, GELU blocks, and a classifier on the first token.

    The sizes of ``bert-tiny`` are 30,522 tokens, two layers, width 128, feed-forward layers of 512, two heads.
    """

    def __init__(self, rows: int = 30_522, width: int = 128, layers: int = 2, classes: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(rows, width, padding_idx=0), nn.Embedding(512, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        block = nn.TransformerEncoderLayer(width, 2, 4 * width, 0.1, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.pooler, self.classifier = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of every text."""
        positions = self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        states = self.encoder(self.dropout(self.norm(self.tokens(tokens) + positions)))
        logits: Tensor = self.classifier(torch.tanh(self.pooler(states[:, 0])))
        return logits


class VisionTransformer(nn.Module):
    """Patches of 4x4, one pre-norm transformer block with GELU (width 192, as ViT-Ti), mean over the patches, head."""

    def __init__(self, width: int = 192, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.positions = nn.Parameter(0.02 * torch.randn(64, width))
        self.block = nn.TransformerEncoderLayer(width, 3, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the logits of every picture."""
        tokens = self.patches(pictures).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.head(self.norm(self.block(tokens)).mean(1))
        return logits


class MixerBlock(nn.Module):
    """One block of MLP-Mixer: an MLP over the patches, then an MLP over the channels."""

    def __init__(self, tokens: int, width: int, over_tokens: int, over_channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, over_tokens), nn.GELU(), nn.Linear(over_tokens, tokens))
        self.channels = nn.Sequential(nn.Linear(width, over_channels), nn.GELU(), nn.Linear(over_channels, width))

    def forward(self, x: Tensor) -> Tensor:
        """Mix the patches, then the channels."""
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        mixed: Tensor = x + self.channels(self.norm2(x))
        return mixed


class Mixer(nn.Module):
    """MLP-Mixer for pictures of 3x32x32: patches of 4x4, width 128, two blocks."""

    def __init__(self, width: int = 128, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(*(MixerBlock(64, width, 64, 512) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the logits of every picture."""
        tokens = self.patches(pictures).flatten(2).transpose(1, 2)
        logits: Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return logits


class ResidualBlock(nn.Module):
    """The basic block of ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.short = short if stride > 1 or inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Add the block to its input."""
        inner = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        return functional.relu(inner + self.short(x))


def resnet18(classes: int, *, frozen: bool) -> nn.Module:
    """ResNet-18 with a 3x3 stem for small pictures.

    A frozen backbone stays in evaluation mode. One pass over random pictures sets its running statistics, which a
    trained backbone has.
    """
    widths = (64, 64, 128, 256, 512)
    blocks = [
        ResidualBlock(widths[stage] if first else widths[stage + 1], widths[stage + 1], 2 if first and stage else 1)
        for stage in range(4)
        for first in (True, False)
    ]
    stem = (nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    backbone = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    if frozen:
        for module in backbone.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = None  # the running statistics are those of the pass
        with torch.no_grad():
            backbone(torch.randn(64, 3, 32, 32))
    return nn.Sequential(Frozen(backbone) if frozen else backbone, nn.Linear(512, classes))


class TabTransformer(nn.Module):
    """One embedding per categorical column, a transformer over the columns, and an MLP that also reads the numbers."""

    def __init__(self, categories: tuple[int, ...] = ADULT_CATEGORIES, numbers: int = 6, width: int = 32) -> None:
        super().__init__()
        self.columns = nn.ModuleList(nn.Embedding(rows, width) for rows in categories)
        self.block = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, "gelu", batch_first=True)
        self.norm, inputs = nn.LayerNorm(numbers), len(categories) * width + numbers
        self.mlp = nn.Sequential(
            *(nn.Linear(inputs, 4 * inputs), nn.ReLU(), nn.Linear(4 * inputs, 2 * inputs), nn.ReLU()),
            nn.Linear(2 * inputs, 2),
        )

    def forward(self, rows: Tensor) -> Tensor:
        """Return the logits. The first columns of a row are category numbers, the others are numbers."""
        tokens = torch.stack([table(rows[:, at].long()) for at, table in enumerate(self.columns)], 1)
        joined = torch.cat([self.block(tokens).flatten(1), self.norm(rows[:, len(self.columns) :].float())], 1)
        logits: Tensor = self.mlp(joined)
        return logits


class DeepMIL(nn.Module):
    """Gated attention over a bag of feature vectors, as FLamby's model for Camelyon16."""

    def __init__(self) -> None:
        super().__init__()
        self.extract, self.value, self.gate = nn.Linear(2048, 128), nn.Linear(128, 128), nn.Linear(128, 128)
        self.weight = nn.Linear(128, 1)
        layers = (nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1), nn.Sigmoid())
        self.classifier = nn.Sequential(*layers)

    def forward(self, bags: Tensor) -> Tensor:
        """Return the probability of every bag."""
        hidden = self.extract(bags)
        share = self.weight(torch.tanh(self.value(hidden)) * torch.sigmoid(self.gate(hidden))).softmax(1)
        probability: Tensor = self.classifier((share * hidden).sum(1))
        return probability


def _lenet() -> nn.Module:
    """Two 5x5 convolutions without padding (6 and 16 channels), 400-120-84-10."""
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def _fedavg(hidden: int, classes: int, padding: int = 2, pool_padding: int = 0) -> nn.Module:
    """Two 5x5 convolutions (32 and 64 channels) with ReLU and max-pooling, 3,136 features, one hidden layer."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2, padding=pool_padding)),
        *(nn.Conv2d(32, 64, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2, padding=pool_padding)),
        *(nn.Flatten(), nn.Linear(3136, hidden), nn.ReLU(), nn.Linear(hidden, classes)),
    )


def _cnn_dropout() -> nn.Module:
    """Two 3x3 convolutions (32 and 64 channels), Dropout before and after the hidden layer of 128."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)),
        *(nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)),
    )


def _keras_cnn() -> nn.Module:
    """Two 3x3 convolutions (32 and 64 channels), Dropout, and the output layer."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.5), nn.Linear(2304, 10)),
    )


def _fedbn() -> nn.Module:
    """Three 5x5 convolutions and two hidden layers (2,048 and 512), with BatchNorm after each of them."""
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 5, 1, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 5, 1, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 128, 5, 1, 2), nn.BatchNorm2d(128), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(6272, 2048), nn.BatchNorm1d(2048), nn.ReLU()),
        *(nn.Linear(2048, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 10)),
    )


def _moderate() -> nn.Module:
    """Six 3x3 convolutions (32 to 256 channels), Dropout, 4,096-512-512-10."""
    layers: list[nn.Module] = []
    for inputs, middle, outputs in ((3, 32, 64), (64, 128, 128), (128, 256, 256)):
        layers += [nn.Conv2d(inputs, middle, 3, padding=1), nn.ReLU(), nn.Conv2d(middle, outputs, 3, padding=1)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)] + ([nn.Dropout2d(0.05)] if inputs == 64 else [])
    head = (nn.Linear(4096, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 10))
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.1), *head)


def _celeba() -> nn.Module:
    """Four 3x3 convolutions of 32 channels with BatchNorm, max-pooling and ReLU, and two outputs."""
    layers: list[nn.Module] = []
    for inputs in (3, 32, 32, 32):
        layers += [nn.Conv2d(inputs, 32, 3, padding=1), nn.BatchNorm2d(32), nn.MaxPool2d(2, ceil_mode=True), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 36, 2))


def _mlp(*sizes: int, last: nn.Module | None = None) -> nn.Module:
    """Linear layers with ReLU between them, after flattening the input."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1], *([] if last is None else [last]))


GREY, COLOUR = (1, 28, 28), (3, 32, 32)
ZOO = {
    "mlx": Network("MLP 784-32-32-10", "Flower quickstart-mlx", lambda: _mlp(784, 32, 32, 10), GREY, "pictures"),
    "tabular": Network(
        "MLP 14-128-64-1", "Flower fl-tabular", lambda: _mlp(14, 128, 64, 1, last=nn.Sigmoid()), (14,), "table"
    ),
    "logistic": Network(
        "logistic regression 784-10",
        "Flower baseline fedprox, FedML",
        lambda: _mlp(784, 10),
        GREY,
        "pictures",
    ),
    "heart": Network(
        "logistic regression 13-1", "FLamby Heart-Disease", lambda: _mlp(13, 1, last=nn.Sigmoid()), (13,), "table"
    ),
    "lenet": Network("LeNet 400-120-84-10", "Flower quickstart-pytorch, NVFlare hello-pt", _lenet, COLOUR, "pictures"),
    "fedavg": Network(
        "CNN of the FedAvg paper, hidden 512", "FedML CNN_OriginalFedAvg", lambda: _fedavg(512, 10), GREY, "pictures"
    ),
    "fedprox": Network(
        "CNN of the FedAvg paper, padding 1",
        "Flower baseline fedprox",
        lambda: _fedavg(512, 10, 1, 1),
        GREY,
        "pictures",
    ),
    "leaf": Network(
        "CNN of the FedAvg paper, hidden 2,048, 62 classes", "LEAF FEMNIST", lambda: _fedavg(2048, 62), GREY, "pictures"
    ),
    "dropout": Network("CNN with Dropout, 9,216-128-10", "FedML CNN_DropOut", _cnn_dropout, GREY, "pictures"),
    "keras": Network("CNN with Dropout, 2,304-10", "Flower quickstart-tensorflow", _keras_cnn, COLOUR, "pictures"),
    "fedbn": Network(
        "CNN with BatchNorm, 6,272-2,048-512-10", "Flower baseline fedbn", _fedbn, (3, 28, 28), "pictures"
    ),
    "moderate": Network("CNN with Dropout, 4,096-512-512-10", "NVFlare cifar10", _moderate, COLOUR, "pictures"),
    "celeba": Network("CNN with BatchNorm, 1,152-2", "LEAF CelebA", _celeba, (3, 84, 84), "pictures"),
    "resnet": Network(
        "ResNet-18, trained as a whole", "NVFlare, FedML", lambda: resnet18(10, frozen=False), COLOUR, "pictures"
    ),
    "head": Network(
        "ResNet-18, frozen, new head of 100 classes",
        "fine-tuning",
        lambda: resnet18(100, frozen=True),
        COLOUR,
        "pictures",
    ),
    "vit": Network("transformer block with GELU", "ViT-Ti, one block", VisionTransformer, COLOUR, "pictures"),
    "mixer": Network("MLP-Mixer, two blocks", "MLP-Mixer", Mixer, COLOUR, "pictures"),
    "shakespeare": Network(
        "LSTM 2 x 256, 80 characters", "LEAF Shakespeare", lambda: Recurrent(80, 8, 256, 2, 80), (80,), "tokens"
    ),
    "stackoverflow": Network(
        "LSTM 670, every next word of 10,004",
        "FedML RNN_StackOverFlow",
        lambda: Recurrent(10_004, 96, 670, 1, 10_004, narrow=96),
        (20,),
        "tokens",
    ),
    "lstm": Network(
        "LSTM 128 classifier, 4 classes", "text classification", lambda: Recurrent(5000, 64, 128, 1, 4), (40,), "tokens"
    ),
    "bert": Network("BERT-tiny with Dropout", "Flower quickstart-huggingface", Bert, (32,), "tokens"),
    "tabtransformer": Network("TabTransformer", "Adult census data", TabTransformer, (14,), "categories"),
    "mil": Network("attention over a bag (DeepMIL)", "FLamby Camelyon16", DeepMIL, (16, 2048), "bags"),
}
"""The networks by short name."""
