"""All branches of a layer in few launches: kernels that share one, and what starts them."""
