-- PROMOTE_DELAYED, the search of EXPIRE, REAP_CONSUMER. ARGV: most items per kind, then ids held by the caller, ...
-- Reply: {server time, expired {id, lane, entry, ttl_ms, time, attempt}, cancelled ids of those held, consumers reaped,
-- deleted {as expired}}
local most = ARGV[1]
local now = now_ms()

for _, member in ipairs(redis.call('ZRANGEBYSCORE', P .. 'delayed', '-inf', text(now), 'LIMIT', 0, most)) do
  local id, lane, attempt, time, start = string.match(member, '^(%S+) (%S+) (%d+) (%d+)\n()')
  local done = redis.call('GET', P .. 'done:' .. id)
  if done then
    forget(id, string.match(done, '^(%S+)'))
  else
    local job = redis.call('HMGET', job_key(id), 'tenant', 'at')
    if not job[2] then redis.call('HSET', job_key(id), 'attempt', attempt, 'time', time) end
    if not job[2] or job[2] == 'delayed' then enter_lane(lane, id, job[1], string.sub(member, start)) end
  end
  redis.call('ZREM', P .. 'delayed', member)
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

-- CHECK. No script leaves a job in no place, but an operator can: XDEL, XTRIM, XACK, XGROUP, DEL. Who looks after such a
-- job is gone from the lists, so its record is what it is found by. What still has its envelope is put back; the rest
-- is answered.
local deleted = {}

local function is_alive(consumer)
  return is_set(consumer) and consumer ~= PARKED and redis.call('EXISTS', P .. 'worker:' .. consumer) == 1
end

local function is_delivered(lane, entry)
  local ms, number = string.match(entry, '^(%d+)-(%d+)$')
  local last_ms, last_number = string.match(last_delivered(lane), '^(%d+)-(%d+)$')
  if ms ~= last_ms then return tonumber(ms) < tonumber(last_ms) end
  return tonumber(number) <= tonumber(last_number)
end

-- One function per place; true when the job is gone from it for good.
local check = {}
function check.lane(_, job)
  local holder = owner(job.lane, job.entry)
  if not has_entry(job.lane, job.entry) then return not is_alive(holder) and not is_alive(job.begun) end
  if not holder and is_delivered(job.lane, job.entry) then
    redis.call('XCLAIM', lane_key(job.lane), GROUP, PARKED, 0, job.entry, 'IDLE', 3600000, 'FORCE', 'JUSTID')
    redis.call('PUBLISH', P .. 'events', 'released')
  end
  return false
end

function check.held(id, job)
  local is_listed = redis.call('LPOS', held_key(job.lane, job.tenant), id)
  local is_next = (tonumber(redis.call('HGET', tenants_key(job.lane), job.tenant)) or 0) > 0
  if is_listed and is_next then return false end
  redis.call('LREM', held_key(job.lane, job.tenant), 1, id)
  count_held(job.lane, -1)
  redis.call('HDEL', job_key(id), 'held')
  enter_lane(job.lane, id, job.tenant, job.held)
  return false
end

function check.delayed(id) return #delayed_members(id) == 0 end

local FIELDS = {'at', 'lane', 'entry', 'tenant', 'begun', 'held', 'time', 'ttl', 'attempt'}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'checks', '-inf', text(now), 'LIMIT', 0, most)) do
  local values, job = redis.call('HMGET', job_key(id), unpack(FIELDS)), {}
  for number, name in ipairs(FIELDS) do job[name] = values[number] or '' end
  if job.at == '' then
    redis.call('ZREM', P .. 'checks', id)
  elseif check[job.at](id, job) then
    deleted[#deleted + 1] = {id, job.lane, job.entry, is_set(job.ttl) and job.ttl or '3600000',
                             is_set(job.time) and job.time or '0', is_set(job.attempt) and job.attempt or '0'}
  else
    check_later(id, now, now - (tonumber(job.time) or now))
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
return {text(now), expired, cancelled, reaped, deleted}
