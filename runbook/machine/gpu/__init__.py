"""What the GPUs are and count: by NVML, and by the XML of `nvidia-smi -q -x`."""
