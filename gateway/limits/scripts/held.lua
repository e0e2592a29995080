-- The requests that have reservations.

return redis.call('HKEYS', held_key)
