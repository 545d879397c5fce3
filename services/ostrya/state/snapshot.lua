-- All resume points as of seq: ARGV[5] = packed snapshot, ARGV[6] = log length. With the last number it compacts; with a later
-- one it replaces what was lost, and a marker in the journal sends the followers to it.
local refused = fence()
if refused then return refused end
local last = last_seq()
-- Nobody else writes here, so a number above the writer's own is nobody's: the writer begins anew.
if seq < last then return 'NOEPOCH' end
if seq > last then
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[6], ARGV[1] .. '-' .. ARGV[2], 's', '')
end
redis.call('SET', KEYS[4], ARGV[5], 'PX', ARGV[4])
redis.call('HSET', KEYS[2], 's', ARGV[2], 'ss', ARGV[2])
return renew()
