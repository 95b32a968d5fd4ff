-- BEGIN. ARGV: consumer, attempts allowed, deaths alone allowed, then lane, entry, id, ...
-- Reply, one per job: started, lost, cancelled, exhausted. `begun` names the consumer, so a repeat counts once.
local consumer, max_attempts, max_kills = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

-- The entries of a batch were as a rule read together: one question then tells that all are the caller's. What is not in
-- its answer is asked for by itself.
local mine = {}
if #ARGV > 6 then
  local last = #ARGV - 2
  local found = redis.pcall('XPENDING', lane_key(ARGV[last]), GROUP, ARGV[5], ARGV[last + 1], last, consumer)
  for _, pending in ipairs(found) do mine[ARGV[last] .. pending[1]] = true end
end

local function begin(lane, entry, id)
  local flags = redis.call('MGET', P .. 'done:' .. id, P .. 'cancel:' .. id)
  if flags[1] then
    forget(id, string.match(flags[1], '^(%S+)'))
    drop_entry(lane, entry)
    return 'lost'
  end
  if not mine[lane .. entry] and not holds(consumer, lane, entry, id) then return 'lost' end
  if flags[2] then return 'cancelled' end
  local job = redis.call('HMGET', job_key(id), 'begun', 'attempt', 'kills', 'at', 'entry')
  local attempt = tonumber(job[2]) or 0
  if job[1] == consumer then return 'started' end
  if attempt >= max_attempts or (tonumber(job[3]) or 0) >= max_kills then return 'exhausted' end
  redis.call('HSET', job_key(id), 'attempt', text(attempt + 1), 'begun', consumer)
  if job[4] ~= 'lane' or job[5] ~= entry then
    redis.call('HSET', job_key(id), 'at', 'lane', 'lane', lane, 'entry', entry)
  end
  if not job[4] then check_later(id, now_ms(), 0) end  -- a flush took its record
  return 'started'
end

local out = {}
for i = 4, #ARGV, 3 do out[#out + 1] = begin(ARGV[i], ARGV[i + 1], ARGV[i + 2]) end
return out
