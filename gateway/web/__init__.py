"""HTTP edge: routes, wire schemas, error shapes, streams."""
