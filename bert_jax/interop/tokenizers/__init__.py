"""Tokenizer files of Hugging Face folders, in and out, and what other libraries do otherwise with them."""
