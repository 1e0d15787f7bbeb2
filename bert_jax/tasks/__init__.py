"""Fine-tuning tasks; each task defines its model inputs, output layers, loss, output decoding and metrics."""
