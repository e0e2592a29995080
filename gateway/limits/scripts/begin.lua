-- Begin an epoch, or add to it. KEYS[3]: the epoch, KEYS[4]: the quotas whose amounts have been told, KEYS[5…]: the keys
-- that arguments name by their index.

local _, _, committed, reservations = unpack(args)
local is_begun = redis.call('EXISTS', KEYS[3]) == 1

for _, told in ipairs(committed) do
  local quota = { [KIND] = QUOTA, [KEY] = KEYS[told[1]] }
  local first, second = opened(quota, redis.call('GET', quota[KEY]))
  local is_first = redis.call('SADD', KEYS[4], quota[KEY]) == 1
  if not is_begun or (is_first and first == 0) then
    first = told[2]
  end
  keep(quota, first, second)
end
redis.call('PEXPIRE', KEYS[4], text(IDLE_MS))
redis.call('SET', KEYS[3], text(now))

for _, item in ipairs(reservations) do
  local request, lease_ms, held, indices = unpack(item)
  if not (reservation(request) or tombstone(prefix .. 'done:' .. request)) then
    local uses, reserved = held.uses, held.reserved
    for i, use in ipairs(uses) do
      use[KEY] = KEYS[indices[i]]
    end
    local first, second = opened_all(uses)
    take_all(uses, first, second, reserved)
    for i, use in ipairs(uses) do
      keep(use, first[i], second[i])
    end
    held.answer = { 1, held.granted, -1, -1, 0, 0, 0 }
    hold(request, held, now + lease_ms)
  end
end
return 1
