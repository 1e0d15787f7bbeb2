"""A loaded model at work: forward passes, embeddings, predictions, filled masks."""
