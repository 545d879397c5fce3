-- Stands before every script of a worker. KEYS: lease, meta, journal, snapshot. ARGV: epoch, seq, lease ms, kept ms, ...
local epoch, seq = tonumber(ARGV[1]), tonumber(ARGV[2])

-- A number as our scripts write them (keys.MAX_EPOCH); nil for whatever else stands there, a key of another type included.
local function stored(field)
  local value = redis.pcall('HGET', KEYS[2], field)
  local number = type(value) == 'string' and string.match(value, '^%d+$') and tonumber(value)
  if number and number < 9007199254740992 then return number end
  return nil
end

-- nil: go on. NOEPOCH: Redis does not know this registration (emptied, expired, or an old replica took over). FENCED: a
-- younger process has the identity.
local function fence()
  local known = stored('e') or 0
  if known < epoch then return 'NOEPOCH' end
  if known > epoch then return 'FENCED' end
  return nil
end

local function last_seq()
  return stored('s') or -1
end

local function renew()
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
  for i = 2, 4 do redis.call('PEXPIRE', KEYS[i], ARGV[4]) end
  return 'OK'
end
