-- What all scripts begin with: the arithmetic of meters, and how meters and reservations are kept.
--
-- Each meter is one string: a bucket "level at" (parts, ms), a quota "committed reserved", a lease "active".
-- Reservations are in the hash KEYS[1] (request -> packed), and by the end of their lease in the sorted set KEYS[2].
-- Keys that only this store knows, those of a reservation's meters, carry the organization's tag as KEYS do.
--
-- Figures are whole and below 2^53, where doubles are exact, products of two of them included wherever one is taken; a
-- sum that could be above is taken in two steps. A quotient of such figures, rounded up or down, is exact too.

local PARTS, MOST_TOKENS = 86400000, 10000000
local SETTLED_MS, REAPED_MS, IDLE_MS = 600000, 3600000, 3456000000
local BUCKET, QUOTA, LEASE = 1, 2, 3
-- A use. AMOUNT: capacity, amount or limit. RATE: parts per ms; of a quota 1 if it is hard.
local KIND, IS_SHADOW, AMOUNT, RATE, DEBT, PROMPT, CACHED, OUTPUT, PER_REQUEST, KEY = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10

local held_key, due_key = KEYS[1], KEYS[2]
local prefix = string.sub(held_key, 1, -5) -- without "held"
local args = cmsgpack.unpack(ARGV[1])

local function text(figure)
  return string.format('%.0f', figure)
end

local function redis_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local now, run_id = args[1], args[3]
if now == 0 then
  now = redis_ms()
end

-- When the organization was last asked for anything, the lease last told of, and when it was last asked again after a
-- silence of more than half of that: nobody may have been able to report meanwhile.
local asked_key = prefix .. 'asked'
local asked, lease, back = now, 0, 0
local was = redis.call('GET', asked_key)
if was then
  asked, lease, back = string.match(was, '^(%S+) (%S+) (%S+)$')
  asked, lease, back = tonumber(asked), tonumber(lease), tonumber(back)
  if 2 * (now - asked) > lease then
    back = now
  end
end

local function note_asked()
  redis.call('SET', asked_key, string.format('%.0f %.0f %.0f', now, lease, back), 'PX', text(IDLE_MS))
end
note_asked()

-- Whether what is committed is known. One who begins in another life of Redis, or at another Redis that took its place,
-- may have an older state, with its epoch: who began is part of it.
local function is_known(epoch_key)
  return redis.call('GET', epoch_key) == run_id
end

local function cost(use, prompt, cached, output)
  local millionths = (prompt - cached) * use[PROMPT] + cached * use[CACHED] + output * use[OUTPUT]
  return use[PER_REQUEST] + math.ceil(millionths / 1000000)
end

-- The most output that costs no more than `left` together with the prompt; below 0 if the prompt alone does.
local function most_output(use, prompt, left)
  local room = math.min(left - use[PER_REQUEST], 2000000000) * 1000000 - prompt * use[PROMPT]
  if room < 0 then
    return -1
  end
  if use[OUTPUT] == 0 then
    return MOST_TOKENS
  end
  return math.floor(room / use[OUTPUT])
end

local function refilled(use, level, ms)
  local full, rate = use[AMOUNT] * PARTS, use[RATE]
  if rate == 0 then
    return level
  end
  if level < 0 then -- from the deepest debt to full may be above 2^53
    local to_zero = math.floor(-level / rate)
    if ms <= to_zero then
      return level + ms * rate
    end
    level = level + to_zero * rate
    ms = ms - to_zero
  end
  if ms >= math.ceil((full - level) / rate) then
    return full
  end
  return level + ms * rate
end

-- The level with so many units more or less, within the bucket's bounds, and the units that its debt did not take.
local function shifted(use, level, units)
  local whole = math.floor(level / PARTS)
  local rest = level - whole * PARTS
  whole = whole + units
  if whole >= use[AMOUNT] then
    return use[AMOUNT] * PARTS, 0
  end
  if whole >= -use[DEBT] then
    return whole * PARTS + rest, 0
  end
  local below = -use[DEBT] - whole
  if rest > 0 then
    below = below - 1
  end
  return -use[DEBT] * PARTS, below
end

-- A meter's two figures: a bucket's level and its time, now; committed and reserved; active and nothing.
local function opened(use, kept)
  local kind = use[KIND]
  if kind == BUCKET then
    local full = use[AMOUNT] * PARTS
    if not kept then
      return full, now
    end
    local level, at = string.match(kept, '^(%S+) (%S+)$')
    level, at = math.min(math.max(tonumber(level), -use[DEBT] * PARTS), full), tonumber(at)
    if now <= at then -- time never goes back
      return level, at
    end
    return refilled(use, level, now - at), now
  end
  if not kept then
    return 0, 0
  end
  if kind == QUOTA then
    local committed, reserved = string.match(kept, '^(%S+) (%S+)$')
    return tonumber(committed), tonumber(reserved)
  end
  return tonumber(kept), 0
end

-- Of all uses: a table of first figures and one of second ones.
local function opened_all(uses)
  local first, second, keys = {}, {}, {}
  for i, use in ipairs(uses) do
    keys[i] = use[KEY]
  end
  if #keys > 0 then
    local kept = redis.call('MGET', unpack(keys))
    for i, use in ipairs(uses) do
      first[i], second[i] = opened(use, kept[i])
    end
  end
  return first, second
end

local function keep(use, first, second)
  local kind = use[KIND]
  if kind == BUCKET then
    local ms = IDLE_MS -- one that is not refilled would be full if it were forgotten
    if use[RATE] > 0 then
      ms = math.max(2 * math.ceil((use[AMOUNT] + use[DEBT]) * PARTS / use[RATE]), 60000)
    end
    redis.call('SET', use[KEY], string.format('%.0f %.0f', first, second), 'PX', text(ms))
  elseif kind == QUOTA then
    redis.call('SET', use[KEY], string.format('%.0f %.0f', first, second), 'PX', text(IDLE_MS))
  else
    redis.call('SET', use[KEY], text(first), 'PX', text(IDLE_MS))
  end
end

local function remaining(use, first, second)
  local kind = use[KIND]
  if kind == BUCKET then
    return math.floor(first / PARTS)
  end
  return use[AMOUNT] - first - second
end

local function reservation(request)
  local packed = redis.call('HGET', held_key, request)
  return packed and cmsgpack.unpack(packed)
end

local function tombstone(key)
  local packed = redis.call('GET', key)
  return packed and cmsgpack.unpack(packed)
end

-- The units that a bucket is charged at admission. What goes beyond its debt is not kept, nor given back later.
local function taken(use, level, units)
  return math.min(units, math.floor(level / PARTS) + use[DEBT])
end

-- Take what an admitted request holds from all its meters, in place; what a debt does not take is no longer reserved.
local function take_all(uses, first, second, reserved)
  for i, use in ipairs(uses) do
    local kind = use[KIND]
    if kind == BUCKET then
      reserved[i] = taken(use, first[i], reserved[i])
      first[i] = shifted(use, first[i], -reserved[i])
    elseif kind == QUOTA then
      second[i] = second[i] + reserved[i]
    else
      first[i] = first[i] + reserved[i]
    end
  end
end

-- Reservations and what they count in live as long: no time that an organization is idle takes one without the other.
local function hold(request, held, lease_ms)
  held.heard, held.lease = now, lease_ms
  if lease_ms ~= lease then
    lease = lease_ms
    note_asked()
  end
  redis.call('HSET', held_key, request, cmsgpack.pack(held))
  redis.call('ZADD', due_key, text(now + lease_ms), request)
  redis.call('PEXPIRE', held_key, text(IDLE_MS))
  redis.call('PEXPIRE', due_key, text(IDLE_MS))
end

-- Grant a request that runs more output: its quotas reserve that.
local function grow(request, held, first, second, granted)
  for i, use in ipairs(held.uses) do
    if use[KIND] == QUOTA then
      local needed = cost(use, held.prompt, 0, granted)
      second[i] = second[i] + needed - held.reserved[i]
      held.reserved[i] = needed
      keep(use, first[i], second[i])
    end
  end
  held.granted = granted
  redis.call('HSET', held_key, request, cmsgpack.pack(held))
end

local function let_go(request)
  redis.call('HDEL', held_key, request)
  redis.call('ZREM', due_key, request)
end

-- What each use is charged for these tokens in the end.
local function charges(uses, prompt, cached, output)
  local charged = {}
  for i, use in ipairs(uses) do
    charged[i] = use[KIND] == LEASE and 0 or cost(use, prompt, cached, output)
  end
  return charged
end

-- Of each use: no longer reserve `freed`, and charge `after` instead of `before`; a bucket for which that is the same is
-- left as it is. Answers what debts did not take.
local function change(uses, freed, before, after)
  local first, second = opened_all(uses)
  local forgiven = {}
  for i, use in ipairs(uses) do
    local kind = use[KIND]
    local units = freed[i] + before[i] - after[i]
    forgiven[i] = 0
    if kind == BUCKET then
      if units ~= 0 then
        first[i], forgiven[i] = shifted(use, first[i], units)
        keep(use, first[i], second[i])
      end
    else
      if kind == QUOTA then
        first[i], second[i] = first[i] + after[i] - before[i], second[i] - freed[i]
      else
        first[i] = first[i] - freed[i]
      end
      keep(use, first[i], second[i])
    end
  end
  return forgiven
end

local function zeros(uses)
  local nothing = {}
  for i = 1, #uses do
    nothing[i] = 0
  end
  return nothing
end

-- Whether the lease has another whole time to run since the silence after which nothing was heard yet; but once.
local function is_spared(request, held)
  if not held.heard or held.heard >= back or back + held.lease <= now then
    return false
  end
  held.heard = nil
  redis.call('HSET', held_key, request, cmsgpack.pack(held))
  redis.call('ZADD', due_key, text(back + held.lease), request)
  return true
end

-- Look at so many whose leases have run out. Answers those that are settled.
local function reap(most)
  local requests, reaped = redis.call('ZRANGEBYSCORE', due_key, '-inf', text(now), 'LIMIT', 0, most), {}
  for _, request in ipairs(requests) do
    local held = reservation(request)
    if held and not is_spared(request, held) then
      reaped[#reaped + 1] = request
      local charged = charges(held.uses, held.prompt, 0, held.reported)
      local forgiven = change(held.uses, held.reserved, zeros(held.uses), charged)
      local done = { answer = held.answer, charged = charged, forgiven = forgiven, is_reaped = 1, uses = held.uses }
      redis.call('SET', prefix .. 'done:' .. request, cmsgpack.pack(done), 'PX', text(REAPED_MS))
      let_go(request)
    elseif not held then
      let_go(request)
    end
  end
  return reaped
end
