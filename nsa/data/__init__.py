"""Where training tokens come from: generated, or read from documents and packed."""
