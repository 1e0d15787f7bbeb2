"""Tokenizer files of Hugging Face folders: readers, writers, and differences to other libraries."""
