"""Training: role-wise GRPO and supervised warm-up, with exact checkpoints."""
