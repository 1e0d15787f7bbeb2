"""Readers and writers of model formats, around one exchange form."""
