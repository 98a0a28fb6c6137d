"""Runs two sites for two rounds, with audits on the server.

One site sends its update unchanged. The other site audits its own update first, and applies NVFlare's differential
privacy if the update leaks.

    pip install 'spearpp[nvflare,data]'
    python job.py --out audits
"""

import argparse
from pathlib import Path

from model import Net
from nvflare.app_common.filters.svt_privacy import SVTPrivacy
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.client.config import TransferType
from nvflare.recipe import SimEnv

from spearpp.integrations.nvflare import AuditFilter


def main() -> None:
    """Build the job and run it in the simulator."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path("audits"), help="folder for the server's reports")
    options.add_argument("--workspace", default="workspace", help="folder of the simulator")
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--keep", action="store_true", help="keep the recovered inputs in the reports")
    options.add_argument("--salt", help="secret for the pseudonyms of sites in folder names")
    given = options.parse_args()
    recipe = FedAvgRecipe(
        name="audited",
        model=Net(),
        min_clients=2,
        num_rounds=given.rounds,
        train_script="client.py",
        params_transfer_type=TransferType.DIFF,
        per_site_config={"site-1": {}, "site-2": {}},
    )
    # On the server, one filter remembers the weights that are sent, and one audits the updates that are received.
    recipe.add_server_output_filter(AuditFilter(), tasks=["train"])
    keep = "none" if given.keep else "omit"
    recipe.add_server_input_filter(
        AuditFilter(out=str(given.out.absolute()), redact=keep, salt=given.salt), tasks=["train"]
    )
    # One site defends itself. The audit is the last filter before the update leaves the site.
    recipe.add_client_input_filter(AuditFilter(), tasks=["train"], clients=["site-2"])
    defence = SVTPrivacy(fraction=0.5, noise_var=1.0)
    recipe.add_client_output_filter(AuditFilter("noise", noise=defence), tasks=["train"], clients=["site-2"])
    recipe.execute(SimEnv(clients=["site-1", "site-2"], workspace_root=given.workspace))
    for report in sorted(given.out.glob("round-*/client-*/report.html")):
        print(report)


if __name__ == "__main__":
    main()
