"""A Flower app whose server audits what its clients send."""
