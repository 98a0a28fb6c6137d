"""One site: in every round, it takes one step of SGD on its whole batch (FedSGD)."""

import argparse

import nvflare.client as flare
import torch
from model import Net, data_of

options = argparse.ArgumentParser()
options.add_argument("--lr", type=float, default=0.1)
rate = options.parse_args().lr

flare.init()
batch = data_of(flare.get_site_name())
while flare.is_running():
    received = flare.receive()
    if received is None:
        break
    net = Net()
    net.load_state_dict({name: torch.as_tensor(each) for name, each in received.params.items()})
    optimiser = torch.optim.SGD(net.parameters(), lr=rate)
    torch.nn.functional.cross_entropy(net(batch.inputs), batch.labels).backward()
    optimiser.step()
    flare.send(flare.FLModel(params=net.state_dict(), meta={"NUM_STEPS_CURRENT_ROUND": 1}))
