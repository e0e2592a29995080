-- Raise the output that a request may have. Answers what is granted now, or -1 if there is no such reservation.
-- changed: by key, a quota's IS_SHADOW, AMOUNT and RATE as they are now.

local _, _, request, wanted, changed = unpack(args)
local held = reservation(request)
if not held then
  return -1
end
local uses, reserved = held.uses, held.reserved
local first, second = opened_all(uses)
local granted = math.min(wanted, MOST_TOKENS - held.prompt)
for i, use in ipairs(uses) do
  local is_shadow, amount, is_hard = use[IS_SHADOW], use[AMOUNT], use[RATE]
  if changed[use[KEY]] then
    is_shadow, amount, is_hard = unpack(changed[use[KEY]])
  end
  if use[KIND] == QUOTA and is_hard == 1 and is_shadow == 0 then
    local left = amount - first[i] - second[i] + reserved[i]
    granted = math.min(granted, most_output(use, held.prompt, left))
  end
end
if granted <= held.granted then
  return held.granted
end
for i, use in ipairs(uses) do
  if use[KIND] == QUOTA then
    local needed = cost(use, held.prompt, 0, granted)
    second[i] = second[i] + needed - reserved[i]
    reserved[i] = needed
    keep(use, first[i], second[i])
  end
end
held.granted = granted
redis.call('HSET', held_key, request, cmsgpack.pack(held))
return granted
