"""Fair share: windowed hierarchical start-time fair queueing over a tree of weights. See ../README.md."""
