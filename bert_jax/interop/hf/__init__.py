"""Folders of Hugging Face, in and out: names, description, tensors, and the comparison with transformers."""
