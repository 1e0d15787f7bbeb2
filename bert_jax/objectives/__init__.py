"""Training objectives.

Losses and metrics are (sum, weight) pairs, which are added over the whole global batch before they are divided.
"""
