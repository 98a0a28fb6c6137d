"""Lists the benchmarks: ``make bench NAME=speed``."""

BENCHMARKS = {
    "speed": "the gated search against its yardsticks; more work than the committed baseline fails",
    "hostile": "clients that try to break a certificate, compared with the truth (must find no wrong claim)",
    "certificates": "wrong certificates over varied data (must be none)",
    "audit": "verdicts on ordinary clients, and false alarms (must be none)",
    "gated": "the gated search, table by table",
    "frontier": "one layer against two: how large a batch is recovered",
    "paper": "the paper's search beside geoopt's: steps a second",
    "fused": "the paper's search in one GPU kernel against the same step by step",
    "descent": "the gated descent in one GPU kernel against the same step by step",
    "overhead": "what Python costs a descent on one core",
    "federation": "what audits cost a Flower federation: rounds a minute, memory, drops",
    "memory": "the largest resident size where a layer has 100 million weights, by file format",
}
"""Each is a module of this package. Those on CIFAR-10 read the file that SPEARPP_DATA names."""

if __name__ == "__main__":
    for name, words in BENCHMARKS.items():
        print(f"make bench NAME={name:<14}{words}")
