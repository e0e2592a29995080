-- End a reservation, or correct one that was reaped. KEYS[3]: the request's tombstone.
--
-- Answers {was reaped, was settled, charged…, forgiven…}, or nothing if the request is not known.

local _, _, _, request, prompt, cached, output = unpack(args)
local was_settled = 0
local held, done = reservation(request), nil
if held then
  done = { answer = held.answer, charged = charges(held.uses, prompt, cached, output), is_reaped = 0 }
  done.forgiven = change(held.uses, held.reserved, zeros(held.uses), done.charged)
  let_go(request)
else
  done = tombstone(KEYS[3])
  if not done then
    return {}
  end
  local uses = done.uses
  if uses then
    local before, forgiven = done.charged, done.forgiven
    done.charged = charges(uses, prompt, cached, output)
    done.forgiven = change(uses, zeros(uses), before, done.charged)
    for i, units in ipairs(forgiven) do
      done.forgiven[i] = done.forgiven[i] + units
    end
    done.uses = nil
  else
    was_settled = 1
  end
end
if was_settled == 0 then
  redis.call('SET', KEYS[3], cmsgpack.pack(done), 'PX', text(SETTLED_MS))
end
local answer = { done.is_reaped, was_settled }
for _, figures in ipairs({ done.charged, done.forgiven }) do
  for _, figure in ipairs(figures) do
    answer[#answer + 1] = figure
  end
end
return answer
