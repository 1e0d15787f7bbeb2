"""Reader and writer of Hugging Face folders: names, config.json, tensors, comparison with transformers."""
