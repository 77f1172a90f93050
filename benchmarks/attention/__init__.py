"""What attention_gpu and triton_tune share: what arms compute, how long, and by which kernels."""
