"""Distillation on a task: what a student learns from teachers, by kind of task, and the outputs of the teachers."""
