"""Task kinds of fine-tuning: featurizer, output layers, loss, decoding of outputs and metrics of each."""
