"""Train models that do not fit one accelerator."""
