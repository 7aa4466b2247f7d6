"""What a released model says about who was in its training data: attacks on a run's models, and what they found."""
