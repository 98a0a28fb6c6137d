"""The server: FedAvg inside ``AuditStrategy``, which audits one random reply in each round."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp import strategy as strategies

from audited.task import Net
from spearpp.integrations.flower import AuditStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation with the options in ``pyproject.toml``."""
    config = context.run_config
    torch.manual_seed(0)
    strategy = strategies.FedAvg(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2)
    if config["audit"]:
        strategy = AuditStrategy(strategy, out=str(config["out"]), model=Net(), redact=str(config["redact"]))
    result = strategy.start(
        grid,
        ArrayRecord(Net().state_dict()),
        num_rounds=int(config["num-server-rounds"]),
        train_config=ConfigRecord({"lr": config["learning-rate"], "local-steps": 1, "dp": config["dp"]}),
    )
    print(result.train_metrics_clientapp)
