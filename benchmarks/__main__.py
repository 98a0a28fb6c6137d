"""Lists the benchmarks. Run one of them with ``make bench NAME=speed``."""

BENCHMARKS = {
    "speed": "work and time of the gated search; fails if it needs more work than the committed baseline",
    "hostile": "clients that try to break a certificate; counts claims that the truth contradicts (must be none)",
    "certificates": "counts wrong certificates on several data sets (must be none)",
    "audit": "verdicts of audits on ordinary clients, and false alarms (must be none)",
    "gated": "recovery rates of the gated search in the settings of the paper's tables",
    "equations": "recovery rates of the network equations, by activation, width and batch size; also trained networks",
    "equations_clients": "the network equations after local training (FedAvg) and with noise",
    "pixels": "pictures that are recovered through convolutions and max-pooling, by network and batch size",
    "dp_bound": "two attacks on DP-SGD beside the bound that the stated noise implies (honest rows must stay below it)",
    "frontier": "largest batch that is recovered from one layer and from two layers",
    "paper": "steps per second of the paper's search, of geoopt and of plain PyTorch",
    "fused": "the paper's search in one GPU kernel, compared with single steps",
    "descent": "the gated descent in one GPU kernel, compared with single steps",
    "overhead": "share of time that Python takes in a descent on one core",
    "federation": "cost of audits in a Flower federation: rounds per minute, memory, dropped audits",
    "memory": "peak memory of an audit of a layer with 100 million weights, by file format",
}
"""Modules of this package. Benchmarks on CIFAR-10 read the file at the path in SPEARPP_DATA."""

if __name__ == "__main__":
    for name, description in BENCHMARKS.items():
        print(f"make bench NAME={name:<18}{description}")
