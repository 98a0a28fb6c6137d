"""The client: trains and sends its weights; where the server asks for it, Flower's own mod makes them private."""

from collections.abc import Callable

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod

from audited.task import Net, data_of, train

private = LocalDpMod(clipping_norm=1.0, sensitivity=0.01, epsilon=1.0, delta=1e-5)


def where_asked(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Flower's local differential privacy if the configuration has ``dp``. Your app would list the mod itself."""
    config = message.content.config_records.get("config", {})
    return private(message, context, call_next) if config.get("dp") else call_next(message, context)


# With spearpp on the client too: mods=[audit_mod("block"), where_asked]. The first mod is the outermost.
app = ClientApp(mods=[where_asked])


@app.train()
def fit(message: Message, context: Context) -> Message:
    """One round of training."""
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    partition = int(context.node_config["partition-id"])
    loss = train(net, data_of(partition), float(message.content["config"]["lr"]))
    metrics = MetricRecord({"loss": loss, "num-examples": 8})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)
