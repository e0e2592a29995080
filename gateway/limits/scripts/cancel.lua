-- Give back all that a request holds, or what it was charged when it was reaped. KEYS[3]: the request's tombstone.
--
-- Answers 1, or 0 if there is nothing to give back.

local _, _, _, request = unpack(args)
local held = reservation(request)
if held then
  local nothing = zeros(held.uses)
  change(held.uses, held.reserved, nothing, nothing)
  let_go(request)
  return 1
end
local done = tombstone(KEYS[3])
if done and done.uses then
  local nothing = zeros(done.uses)
  change(done.uses, nothing, done.charged, nothing)
  redis.call('DEL', KEYS[3])
  return 1
end
return 0
