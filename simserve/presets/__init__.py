"""Data files: shapes of models, data sheets of GPUs, cost profiles, and where public traces are."""
