-- Begin leases anew. Arguments: request, output, request, output …; answers the indices of those without a reservation.

local _, _, _, lease_ms, outputs = unpack(args)
local missing = {}
for i = 1, #outputs, 2 do
  local request = outputs[i]
  local held = reservation(request)
  if held then
    held.reported = math.max(held.reported, outputs[i + 1])
    hold(request, held, lease_ms)
  else
    missing[#missing + 1] = (i - 1) / 2
  end
end
return missing
