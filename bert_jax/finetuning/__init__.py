"""Fine-tuning: training of a model on the records of a task."""
