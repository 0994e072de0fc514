"""What a finished run looks like to people: plots and tables made from a run directory."""
