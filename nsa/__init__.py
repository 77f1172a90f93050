"""Native Sparse Attention: attention, model, data and trainer."""
