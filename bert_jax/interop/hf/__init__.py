"""Reader and writer of Hugging Face folders: tensor names, config.json, tensors, comparison with transformers."""
