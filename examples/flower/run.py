"""Runs the same federation three times: without audits, with audits, and with audits of private clients.

    pip install 'spearpp[flower,data]' 'flwr[simulation]'
    python run.py --out audits

Prints a line for each audit, and whether the audits changed the model.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from audited.client_app import app as client_app
from audited.task import Net
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy
from flwr.simulation import run_simulation

from spearpp.integrations.flower import AuditStrategy

CLIENTS = 3


class InOrder(FedAvg):
    """FedAvg that sums replies in a fixed order, so that two runs have identical results."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the mean of all replies."""
        return super().aggregate_train(server_round, sorted(replies, key=lambda each: each.metadata.src_node_id))


def federation(grid: Grid, strategy: Strategy, *, dp: bool, rounds: int) -> dict[str, torch.Tensor]:
    """Train for some rounds and return the model."""
    torch.manual_seed(0)
    config = ConfigRecord({"lr": 0.1, "local-steps": 1, "dp": dp})
    result = strategy.start(grid, ArrayRecord(Net().state_dict()), num_rounds=rounds, train_config=config)
    print("metrics of the last round:", dict(result.train_metrics_clientapp[rounds]))
    return dict(result.arrays.to_torch_state_dict())


def main() -> None:
    """Simulate the three federations."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path("audits"), help="folder for the reports")
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--keep", action="store_true", help="keep the recovered inputs in the reports")
    given = options.parse_args()
    keep = "none" if given.keep else "omit"
    app = ServerApp()

    @app.main()
    def run(grid: Grid, context: Context) -> None:
        del context
        inner = InOrder(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)
        without = federation(grid, inner, dp=False, rounds=given.rounds)
        # sample=None audits every reply. By default, one random reply is audited in each round.
        audited = AuditStrategy(inner, sample=None, waiting=99, out=given.out / "plain", model=Net(), redact=keep)
        with_audits = federation(grid, audited, dp=False, rounds=given.rounds)
        private = AuditStrategy(inner, sample=None, waiting=99, out=given.out / "private", model=Net(), redact=keep)
        federation(grid, private, dp=True, rounds=given.rounds)
        same = all(torch.equal(without[name], with_audits[name]) for name in without)
        print(f"same model with and without audits: {same}")
        for name, strategy in (("plain", audited), ("private", private)):
            for outcome in strategy.outcomes:
                print(f"{name} {outcome.name}: {outcome.summary}")

    sys.path.insert(0, str(Path(__file__).parent))  # clients run in other processes and import ``audited``
    backend = {"client_resources": {"num_cpus": 1}, "init_args": {"address": "local", "include_dashboard": False}}
    run_simulation(app, client_app, num_supernodes=CLIENTS, backend_config=backend)


if __name__ == "__main__":
    main()
