"""Fine-tuning tasks: each has a featurizer, output layers, a loss, decoding of outputs, and metrics."""
