"""The name of the load format, in every engine."""

FORMAT = "penstock"
