-- One row of a table (KEYS[1]): ARGV field, value, kept ms. What stands there and is no table is nobody's.
-- Nothing is deleted where nothing is: a Redis whose memory is full refuses nothing any more in a script that wrote.
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'hash' and kind ~= 'none' then redis.call('DEL', KEYS[1]) end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 'OK'
