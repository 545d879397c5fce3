-- Rows of a hash (KEYS[1]) whose field is at most ARGV[1] and whose value at most ARGV[2] bytes long, so that a reply is
-- bounded whatever stands there: those named (ARGV[5...]), then about ARGV[3] more by a scan that goes on at ARGV[4].
-- {{field, value, ...}, {the first bytes of fields that were too long or had too long a value, ...}, where to go on}
local longest_field, longest, most, cursor = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local found, seen, too_long = {}, {}, {}

local function take(field)
  if seen[field] then return end
  seen[field] = true
  local size = redis.call('HSTRLEN', KEYS[1], field)
  if #field > longest_field or size > longest then
    if #too_long < 64 then too_long[#too_long + 1] = string.sub(field, 1, longest_field) end
    return
  end
  local value = redis.call('HGET', KEYS[1], field)
  if value then
    found[#found + 1] = field
    found[#found + 1] = value
  end
end

for i = 5, #ARGV do take(ARGV[i]) end
local enough, steps = #found + 2 * most, 0
repeat
  local page = redis.call('HSCAN', KEYS[1], cursor, 'COUNT', 64)
  cursor, steps = page[1], steps + 1
  for i = 1, #page[2], 2 do take(page[2][i]) end
until cursor == '0' or #found >= enough or steps >= 256
return {found, too_long, cursor}
