"""One layer's gradient to the inputs of that layer."""
