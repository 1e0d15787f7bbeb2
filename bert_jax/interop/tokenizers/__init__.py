"""Readers and writers of the tokenizer files in Hugging Face folders, with notes on differences."""
