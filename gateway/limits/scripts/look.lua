-- What each of the meters KEYS[3…] has left.

local uses, left = args[4], {}
for i, use in ipairs(uses) do
  use[KEY] = KEYS[2 + i]
end
local first, second = opened_all(uses)
for i, use in ipairs(uses) do
  left[i] = remaining(use, first[i], second[i])
end
return left
