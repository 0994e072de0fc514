"""Data files: shapes of models and data sheets of GPUs, each with its source."""
