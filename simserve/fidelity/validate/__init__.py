"""How far a simulation is from a log or a real run: `simserve validate`, `--real-gpu`."""
