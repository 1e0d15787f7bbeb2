"""Inference with a loaded model: forward passes, embeddings, predictions, mask filling."""
