"""Distillation on a task: the losses of each task kind, and the outputs of the teachers."""
