-- Still here. Tells a worker whose last batches were lost in a failover (ARGV[2] = the last one it appended).
local refused = fence()
if refused then return refused end
if last_seq() < seq then return 'GAP' end
return renew()
