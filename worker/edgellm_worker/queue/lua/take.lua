-- TAKE and RECLAIM. ARGV: consumer, count, lease_ms, ageing_ms, turn, reclaim (0 or 1), recover (0 or 1),
-- then, to recover, the entries that the caller knows it holds: lane, entry, ...
-- Reply: {server time, rows, {last delivered id per lane}, number reclaimed}
local consumer, remaining, lease_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local ageing_ms, turn = tonumber(ARGV[4]), tonumber(ARGV[5])
local now = now_ms()
local rows, last, num_reclaimed = {}, {}, 0

local function deliver(lane, entry, fields)
  local row = delivery_row(lane, entry, fields)
  if row then
    rows[#rows + 1] = row
    remaining = remaining - 1
  end
end

-- An empty lane has nothing to read; its group matters only to those who look through what is pending.
for _, lane in ipairs(LANES) do
  if ARGV[6] == '1' or ARGV[7] == '1' or lane_length(lane) > 0 then last[lane] = last_delivered(lane) end
end

-- A read whose reply was lost left its entries under this consumer's name.
if ARGV[7] == '1' then
  local known = {}
  for i = 8, #ARGV, 2 do known[ARGV[i] .. ' ' .. ARGV[i + 1]] = true end
  for _, lane in ipairs(LANES) do
    if last[lane] then
      for _, pending in ipairs(redis.call('XPENDING', lane_key(lane), GROUP, '-', '+', 10000, consumer)) do
        if not known[lane .. ' ' .. pending[1]] then
          local found = redis.call('XRANGE', lane_key(lane), pending[1], pending[1])[1]
          if found then deliver(lane, found[1], found[2]) else redis.call('XACK', lane_key(lane), GROUP, pending[1]) end
        end
      end
    end
  end
end

-- RECLAIM. XPENDING IDLE walks the whole list in the server and returns the idle ones alone, so that any number of live
-- leases before them does not matter. An entry that was deleted while pending (a ghost) comes back from XCLAIM as nil on
-- 6.2 and not at all later; it is acknowledged.
local function reclaim(lane)
  local idle = redis.call('XPENDING', lane_key(lane), GROUP, 'IDLE', lease_ms, '-', '+', remaining)
  for _, pending in ipairs(idle) do
    local entry, holder = pending[1], pending[2]
    local claimed = redis.call('XCLAIM', lane_key(lane), GROUP, consumer, lease_ms, entry)[1]
    if not claimed then
      redis.call('XACK', lane_key(lane), GROUP, entry)
    else
      local id = field(claimed[2], 'id')
      if id and holder ~= PARKED then
        local job = redis.call('HMGET', job_key(id), 'begun', 'alone')
        if is_set(job[1]) then
          if job[2] == '1' then redis.call('HINCRBY', job_key(id), 'kills', 1) end
          redis.call('HSET', job_key(id), 'begun', '', 'alone', '1')
        end
      end
      num_reclaimed = num_reclaimed + 1
      deliver(lane, claimed[1], claimed[2])
    end
  end
end
if ARGV[6] == '1' then
  lease_ms = math.max(lease_ms, tonumber(redis.call('GET', P .. 'lease')) or 0)
  for _, lane in ipairs(LANES) do
    if last[lane] and remaining > 0 then reclaim(lane) end
  end
end

-- TAKE. Rank is the lane's number, less one for each ageing period that its oldest waiting job has seen. Lanes of equal
-- rank take turns: an aged backlog shares with fresh urgent jobs, neither starves the other.
local heads = {}
local function peek(number)
  local lane = LANES[number]
  heads[number] = nil
  if not last[lane] then return end
  local head = redis.call('XRANGE', lane_key(lane), '(' .. last[lane], '+', 'COUNT', 1)[1]
  if not head then return end
  local id = field(head[2], 'id')
  local time = tonumber((id and redis.call('HGET', job_key(id), 'time')) or entry_ms(head[1]))
  heads[number] = math.max(1, number - math.floor(math.max(0, now - time) / ageing_ms))
end

local function read(number, count)
  local lane = LANES[number]
  local reply = redis.call('XREADGROUP', 'GROUP', GROUP, consumer, 'COUNT', count, 'STREAMS', lane_key(lane), '>')
  if not reply then
    heads[number] = nil
    return
  end
  for _, entry in ipairs(reply[1][2]) do
    last[lane] = entry[1]
    deliver(lane, entry[1], entry[2])
  end
  if #reply[1][2] < count then heads[number] = nil elseif remaining > 0 then peek(number) end
end

for number = 1, #LANES do peek(number) end
while remaining > 0 do
  local best = {}
  for number = 1, #LANES do
    local rank = heads[number]
    if rank then
      if #best == 0 or rank < heads[best[1]] then best = {number}
      elseif rank == heads[best[1]] then best[#best + 1] = number end
    end
  end
  if #best == 0 then break end
  local number = best[turn % #best + 1]
  turn = turn + 1
  if #best == 1 and heads[number] == number then read(number, remaining) else read(number, 1) end
end

return {text(now), rows, {last.high or '0-0', last.normal or '0-0', last.low or '0-0'}, num_reclaimed}
