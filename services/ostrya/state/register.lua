-- A new epoch: the time in ms, above any epoch stored here and above the caller's floor (ARGV: floor, 0, lease ms, kept ms),
-- so that it grows over restarts, over an emptied Redis and over a clock that went back. No snapshot yet: ss = -1.
local now = redis.call('TIME')
local known = stored('e') or 0
local fresh = math.max(now[1] * 1000 + math.floor(now[2] / 1000), known + 1, epoch + 1)
local text = string.format('%.0f', fresh)
-- The lease first: a Redis whose memory is full refuses a SET, but nothing any more in a script that began with a DEL.
redis.call('SET', KEYS[1], text, 'PX', ARGV[3])
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4])
redis.call('HSET', KEYS[2], 'e', text, 's', '0', 'ss', '-1')
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return text
