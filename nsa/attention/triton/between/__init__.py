"""Between the branches: pooled keys and values before them, the gated sum after them."""
