"""A Flower app whose server audits the updates of its clients."""
