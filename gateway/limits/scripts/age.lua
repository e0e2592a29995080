-- When this was first asked in this life of Redis, and how long ago that is, in ms. KEYS[3]: "life when". If the clock
-- was set back to before that, nobody knows how long ago it is: it is now that was the first time.

local life, born = string.match(redis.call('GET', KEYS[3]) or '', '^(%S*) (%S+)$')
if life ~= run_id or tonumber(born) > now then
  redis.call('SET', KEYS[3], run_id .. ' ' .. text(now))
  return { now, 0 }
end
return { tonumber(born), now - tonumber(born) }
