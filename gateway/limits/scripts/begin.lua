-- Begin an epoch, or add to it. KEYS[3]: the epoch, KEYS[4]: the quotas whose amounts have been told, KEYS[5]: the
-- amounts that parts of this view told, KEYS[6…]: the keys that arguments name by their index.

local STAGED_MS = 600000
local is_counted = {} -- quotas to which more had been committed here than was told
local _, _, _, committed, reservations, settled, is_whole, num_parts = unpack(args)
local has_view = string.sub(KEYS[5], -1) ~= ':'
local is_begun = is_known(KEYS[3])
local is_older = not is_begun and redis.call('EXISTS', KEYS[3]) == 1 -- so is what was counted

for _, told in ipairs(committed) do
  redis.call('HSET', KEYS[5], KEYS[told[1]], text(told[2]))
end
local num_told = tonumber(redis.call('HGET', KEYS[5], '') or 0) -- beside the amounts, whose fields have names
if is_whole == 0 then
  if has_view then
    redis.call('HSET', KEYS[5], '', text(num_told + 1))
  end
  redis.call('PEXPIRE', KEYS[5], text(STAGED_MS))
elseif num_parts > 0 and num_parts ~= num_told then -- they were lost, and who knows what else was
  is_whole = 0
  redis.call('DEL', KEYS[5])
else
  redis.call('HDEL', KEYS[5], '')
  local amounts = redis.call('HGETALL', KEYS[5])
  for i = 1, #amounts, 2 do
    local quota = { [KIND] = QUOTA, [KEY] = amounts[i] }
    local first, second = opened(quota, redis.call('GET', quota[KEY]))
    local is_first = redis.call('SADD', KEYS[4], quota[KEY]) == 1
    local amount = tonumber(amounts[i + 1])
    if not is_begun then
      is_counted[amounts[i]] = first > amount and not is_older
      first = is_counted[amounts[i]] and first or amount
    elseif is_first and first == 0 then
      first = amount
    end
    keep(quota, first, second)
  end
  redis.call('PEXPIRE', KEYS[4], text(IDLE_MS))
  redis.call('DEL', KEYS[5])
end

if is_whole == 1 and not is_begun then
  for _, request in ipairs(settled) do
    local held = reservation(request)
    local is_owed = false
    for _, use in ipairs(held and held.uses or {}) do
      is_owed = is_owed or is_counted[use[KEY]]
    end
    if held and not is_owed then -- it is part of what is committed; what its buckets were charged has to do for them
      local charged, nothing = {}, zeros(held.uses)
      for i, use in ipairs(held.uses) do
        charged[i] = use[KIND] == LEASE and 0 or held.reserved[i]
        if use[KIND] ~= BUCKET then -- which a charge of nothing would clip to what it was at admission
          change({ use }, { held.reserved[i] }, { 0 }, { 0 })
        end
      end
      let_go(request)
      local done = { answer = held.answer, charged = charged, forgiven = nothing, is_reaped = 0 }
      redis.call('SET', prefix .. 'done:' .. request, cmsgpack.pack(done), 'PX', text(SETTLED_MS))
    end
  end
  redis.call('SET', KEYS[3], run_id)
  is_begun = true
end

for _, item in ipairs(reservations) do
  local request, lease_ms, held, indices = unpack(item)
  local known = reservation(request)
  if known and is_older and held.granted > known.granted then -- it was raised since
    local first, second = opened_all(known.uses)
    grow(request, known, first, second, held.granted)
  elseif not (known or tombstone(prefix .. 'done:' .. request)) then
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
    hold(request, held, lease_ms)
  end
end
return is_begun and 1 or 0
