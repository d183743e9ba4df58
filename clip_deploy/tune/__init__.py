"""The settings of a model that serve a load fastest within a latency budget, found by measuring."""
