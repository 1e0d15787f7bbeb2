"""Fine-tuning: from task and records to a trained model."""
