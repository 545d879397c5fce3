-- KEYS: members, load. Removes a worker's rows (ARGV[1]) if its member row is still the one the caller saw (ARGV[2]).
if redis.pcall('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.pcall('HDEL', KEYS[2], ARGV[1])
return 1
