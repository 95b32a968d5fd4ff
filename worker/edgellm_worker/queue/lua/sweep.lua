-- PROMOTE_DELAYED, the search of EXPIRE, REAP_CONSUMER. ARGV: most items per kind, then ids held by the caller, ...
-- Reply: {server time, expired {id, lane, entry, ttl_ms, time, attempt}, cancelled ids of those held, consumers reaped}
local most = ARGV[1]
local now = now_ms()

for _, member in ipairs(redis.call('ZRANGEBYSCORE', P .. 'delayed', '-inf', text(now), 'LIMIT', 0, most)) do
  local id, lane, attempt, time, start = string.match(member, '^(%S+) (%S+) (%d+) (%d+)\n()')
  redis.call('ZREM', P .. 'delayed', member)
  local done = redis.call('GET', P .. 'done:' .. id)
  if done then
    forget(id, string.match(done, '^(%S+)'))
  else
    local job = redis.call('HMGET', job_key(id), 'tenant', 'at')
    if not job[2] then redis.call('HSET', job_key(id), 'attempt', attempt, 'time', time) end
    if not job[2] or job[2] == 'delayed' then enter_lane(lane, id, job[1], string.sub(member, start)) end
  end
end

local expired = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'deadlines', '-inf', text(now), 'LIMIT', 0, most)) do
  local job = redis.call('HMGET', job_key(id), 'at', 'lane', 'entry', 'ttl', 'time', 'attempt')
  if not job[1] then
    redis.call('ZREM', P .. 'deadlines', id)
  else
    local holder = job[1] == 'lane' and owner(job[2], job[3])
    if not holder or holder == PARKED then
      expired[#expired + 1] = {id, job[2], job[3] or '', job[4] or '3600000', job[5] or '0', job[6] or '0'}
    end
  end
end

-- A consumer goes when its process is gone and it holds nothing: one script, so no read can slip between the two checks
-- and lose its entries with the consumer.
local reaped = 0
for _, lane in ipairs(LANES) do
  local consumers = redis.pcall('XINFO', 'CONSUMERS', lane_key(lane), GROUP)
  if not consumers.err then
    for _, consumer in ipairs(consumers) do
      local name = field(consumer, 'name')
      if field(consumer, 'pending') == 0 and redis.call('EXISTS', P .. 'worker:' .. name) == 0 then
        redis.call('XGROUP', 'DELCONSUMER', lane_key(lane), GROUP, name)
        reaped = reaped + 1
      end
    end
  end
end

local cancelled = {}
for i = 2, #ARGV do
  if redis.call('EXISTS', P .. 'cancel:' .. ARGV[i]) == 1 then cancelled[#cancelled + 1] = ARGV[i] end
end
return {text(now), expired, cancelled, reaped}
