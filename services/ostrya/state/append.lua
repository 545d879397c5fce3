-- One batch, in order: ARGV[5] = packed events, ARGV[6] = log length. A repeat is ignored, a gap is refused.
local refused = fence()
if refused then return refused end
local last = last_seq()
if seq > last + 1 then return 'GAP' end
if seq == last + 1 then
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[6], ARGV[1] .. '-' .. ARGV[2], 'b', ARGV[5])
  redis.call('HSET', KEYS[2], 's', ARGV[2])
end
return renew()
