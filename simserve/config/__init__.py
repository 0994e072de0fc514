"""The configuration: model, YAML loader, presets, and the one place that wires classes together."""
