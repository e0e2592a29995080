-- Settle reservations whose leases have run out; answers which.

return reap(args[4])
