-- When this was first asked in this life of Redis, and how long ago that is, in ms. KEYS[3]: "life when".

local life, born = string.match(redis.call('GET', KEYS[3]) or '', '^(%S*) (%S+)$')
if life ~= run_id then
  redis.call('SET', KEYS[3], run_id .. ' ' .. text(now))
  return { now, 0 }
end
return { tonumber(born), math.max(0, now - tonumber(born)) }
