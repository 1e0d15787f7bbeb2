"""Uses of a loaded model: forward passes, embeddings, predictions, filled masks."""
