"""The client: it trains and sends its weights, with local differential privacy if the server asks for it."""

from collections.abc import Callable

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod

from audited.task import Net, data_of, train

private = LocalDpMod(clipping_norm=1.0, sensitivity=0.01, epsilon=1.0, delta=1e-5)


def private_if_configured(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Apply Flower's ``LocalDpMod`` if the configuration sets ``dp``. Your app would list the mod itself."""
    config = message.content.config_records.get("config", {})
    return private(message, context, call_next) if config.get("dp") else call_next(message, context)


# To audit on the client as well: mods=[audit_mod("block"), private_if_configured]. The first mod is the outermost.
app = ClientApp(mods=[private_if_configured])


@app.train()
def fit(message: Message, context: Context) -> Message:
    """Train for one round."""
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    partition = int(context.node_config["partition-id"])
    loss = train(net, data_of(partition), float(message.content["config"]["lr"]))
    metrics = MetricRecord({"loss": loss, "num-examples": 8})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)
