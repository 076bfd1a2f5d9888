"""What is done with logits: penalties, biases, masks, draws, log-probabilities."""
