"""What two results differ in, and what that may be put down to: `simserve compare`."""
