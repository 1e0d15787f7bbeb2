"""Fine-tuning: a task is a featurizer, output layers, a loss, metrics and what makes predictions of outputs."""
