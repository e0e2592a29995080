-- Check or admit. KEYS[3]: the organization's epoch, KEYS[4]: the request's tombstone, KEYS[5…]: the meters.
--
-- Answers {code, granted, binding, wait, is never, redis' ms, number of uses, remaining…, shadow uses that would refuse…},
-- -1 for none, indices from 0.

local REFUSED, ADMITTED, LOST, TOO_LATE = 0, 1, 2, 3

local _, not_after, _, request, owner, lease_ms, prompt, least, expected, most, uses, is_trial = unpack(args)
local redis_now = redis_ms()

-- Whoever asked has given up (its time-out), and would never settle this.
if redis_now > not_after then
  return { TOO_LATE, 0, -1, -1, 0, redis_now, 0 }
end

local known = reservation(request) or tombstone(KEYS[4])
if known then
  known.answer[6] = redis_now
  return known.answer
end

local is_exact = false
for i, use in ipairs(uses) do
  use[KEY] = KEYS[4 + i]
  is_exact = is_exact or (use[KIND] == QUOTA and use[RATE] == 1 and use[IS_SHADOW] == 0)
end
if is_exact and not is_known(KEYS[3]) then
  return { LOST, 0, -1, -1, 0, redis_now, 0 }
end
reap(8)

-- Until a bucket's level would be as high as what it is charged, in steps that stay below 2^53.
local function wait_ms(use, level, charge)
  local missing, ms = charge * PARTS - math.max(level, 0), 0
  if level < 0 then
    ms = math.floor(-level / use[RATE])
    missing = missing + (-level - ms * use[RATE])
  end
  return ms + math.ceil(missing / use[RATE])
end

local first, second = opened_all(uses)
local granted, clamping = most, -1
local binding, is_never, longest, is_waiting = -1, 0, -1, true
local reserved, shadow = {}, {}

for i, use in ipairs(uses) do
  local kind = use[KIND]
  local is_refused, never, wait = false, false, -1
  if kind == BUCKET then
    local bare = cost(use, prompt, 0, 0)
    local charge = math.min(cost(use, prompt, 0, expected), math.max(use[AMOUNT], bare))
    reserved[i] = charge
    never = charge > use[AMOUNT]
    is_refused = never or first[i] < charge * PARTS
    if is_refused and not never and use[RATE] > 0 then
      wait = wait_ms(use, first[i], charge)
    end
  elseif kind == QUOTA then
    if use[RATE] == 1 then
      local output = most_output(use, prompt, use[AMOUNT] - first[i] - second[i])
      is_refused = output < least
      never = is_refused and cost(use, prompt, 0, least) > use[AMOUNT]
      if use[IS_SHADOW] == 0 and not is_refused and output < granted then
        granted, clamping = output, i - 1
      end
    end
  else
    reserved[i] = 1
    is_refused = first[i] >= use[AMOUNT]
  end
  if is_refused and use[IS_SHADOW] == 1 then
    shadow[#shadow + 1] = i - 1
  elseif is_refused then
    if binding < 0 then
      binding = i - 1
    end
    if never then
      is_never = 1
    end
    if wait < 0 then
      is_waiting = false
    end
    longest = math.max(longest, wait)
  end
end

local is_admitted = binding < 0
local answer = { REFUSED, 0, binding, is_waiting and longest or -1, is_never, redis_now, #uses }
if is_admitted then
  answer = { ADMITTED, granted, clamping, -1, 0, redis_now, #uses }
  for i, use in ipairs(uses) do
    if use[KIND] == QUOTA then
      reserved[i] = cost(use, prompt, 0, granted)
    end
  end
  take_all(uses, first, second, reserved)
end
for i, use in ipairs(uses) do
  answer[#answer + 1] = remaining(use, first[i], second[i])
end
for _, index in ipairs(shadow) do
  answer[#answer + 1] = index
end
if is_admitted and is_trial == 0 then
  for i, use in ipairs(uses) do
    keep(use, first[i], second[i])
  end
  local held = { owner = owner, prompt = prompt, granted = granted, reported = 0, uses = uses, reserved = reserved }
  held.answer = answer
  hold(request, held, lease_ms)
end
return answer
