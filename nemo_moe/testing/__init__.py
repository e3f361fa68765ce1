"""Tools to test distributed MoE code, shipped so that users can run them on their own cluster."""
