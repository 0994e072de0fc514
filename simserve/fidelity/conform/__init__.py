"""Whether decisions are the recorded ones, step by step: `simserve conform`."""
