-- Raise the output that a request may have. Answers what is granted now, or -1 if there is no such reservation.
-- KEYS[3]: the organization's epoch. changed: by key, a quota's IS_SHADOW, AMOUNT and RATE as they are now.

local _, _, _, request, wanted, changed = unpack(args)
local held = reservation(request)
if not held then
  return -1
end
local uses, reserved = held.uses, held.reserved
local first, second = opened_all(uses)
local granted = math.min(wanted, MOST_TOKENS - held.prompt)
local is_begun = is_known(KEYS[3])
for i, use in ipairs(uses) do
  local is_shadow, amount, is_hard = use[IS_SHADOW], use[AMOUNT], use[RATE]
  if changed[use[KEY]] then
    is_shadow, amount, is_hard = unpack(changed[use[KEY]])
  end
  if use[KIND] == QUOTA and is_hard == 1 and is_shadow == 0 then
    if not is_begun then -- what is committed is not known
      return held.granted
    end
    local left = amount - first[i] - second[i] + reserved[i]
    granted = math.min(granted, most_output(use, held.prompt, left))
  end
end
if granted <= held.granted then
  return held.granted
end
grow(request, held, first, second, granted)
return granted
