"""Which kernels a model's layers run by, and that those which are not ours agree with ours."""
