"""Block pool, block tables and prefix cache. Pure Python, no torch: it counts blocks, the runner holds bytes."""
