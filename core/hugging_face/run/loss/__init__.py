"""The causal loss of logits that are split over ranks, or computed for one chunk of tokens at a time."""
