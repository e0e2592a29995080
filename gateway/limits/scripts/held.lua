-- The requests that have reservations; only those of `owner`, unless it is empty.

local _, _, _, owner = unpack(args)
if owner == '' then
  return redis.call('HKEYS', held_key)
end
local kept, found = redis.call('HGETALL', held_key), {}
for i = 1, #kept, 2 do
  if cmsgpack.unpack(kept[i + 1]).owner == owner then
    found[#found + 1] = kept[i]
  end
end
return found
