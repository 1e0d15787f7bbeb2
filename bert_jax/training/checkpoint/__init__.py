"""Checkpoints: verified, restored, written."""
