-- Gone at once. The epoch stays until it expires, so that a late word of this process is still refused.
local refused = fence()
if refused then return refused end
redis.call('DEL', KEYS[1], KEYS[3], KEYS[4])
return 'OK'
