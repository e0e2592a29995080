-- Raise the output that a request may have. Answers what is granted now, or -1 if there is no such reservation.

local _, _, request, wanted = unpack(args)
local held = reservation(request)
if not held then
  return -1
end
local uses, reserved = held.uses, held.reserved
local first, second = opened_all(uses)
local granted = math.min(wanted, MOST_TOKENS - held.prompt)
for i, use in ipairs(uses) do
  if use[KIND] == QUOTA and use[RATE] == 1 and use[IS_SHADOW] == 0 then
    local left = use[AMOUNT] - first[i] - second[i] + reserved[i]
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
