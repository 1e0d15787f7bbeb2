"""Weights in and out: readers and writers of the formats that others use, around one exchange form."""
