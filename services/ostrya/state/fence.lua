-- Stands before every script of a worker. KEYS: lease, meta, journal, snapshot. ARGV: epoch, seq, lease ms, kept ms, ...
local epoch, seq = tonumber(ARGV[1]), tonumber(ARGV[2])

-- nil: go on. NOEPOCH: Redis does not know this registration (emptied, expired, or an old replica took over). FENCED: a
-- younger process has the identity.
local function fence()
  local known = tonumber(redis.call('HGET', KEYS[2], 'e') or '0')
  if known < epoch then return 'NOEPOCH' end
  if known > epoch then return 'FENCED' end
  return nil
end

local function last_seq()
  return tonumber(redis.call('HGET', KEYS[2], 's'))
end

local function renew()
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
  for i = 2, 4 do redis.call('PEXPIRE', KEYS[i], ARGV[4]) end
  return 'OK'
end
