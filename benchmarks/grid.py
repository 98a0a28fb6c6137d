"""A Flower grid within one process, for benchmarks and tests. Subclasses define what happens to messages."""

from collections.abc import Iterable
from typing import Any, NoReturn

from flwr.app import Message
from flwr.serverapp import Grid

try:  # newer releases: a message knows the run it is of
    from flwr.supercore.task_identity import TaskIdentity
except ImportError:
    pass
else:
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1

REFUSED = "a grid within one process supports only send_and_receive"


class InProcess(Grid):
    """A grid with the nodes 1, 2, … Subclasses implement ``send_and_receive``."""

    def __init__(self, nodes: int) -> None:
        self.nodes = list(range(1, nodes + 1))

    def get_node_ids(self) -> Iterable[int]:
        return self.nodes

    def set_run(self, run: Any) -> NoReturn:
        raise AssertionError(REFUSED)

    @property
    def run(self) -> NoReturn:
        raise AssertionError(REFUSED)

    def create_message(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError(REFUSED)

    def push_messages(self, messages: Iterable[Message]) -> NoReturn:
        raise AssertionError(REFUSED)

    def pull_messages(self, message_ids: Iterable[str]) -> NoReturn:
        raise AssertionError(REFUSED)
