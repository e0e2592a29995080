"""Where meters are kept: `gateway.services.limit_store.LimitStore` in this process, and in Redis for several."""
