"""Processing of logits: penalties, biases, masks, draws, log-probabilities."""
