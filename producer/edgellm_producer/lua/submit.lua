-- SUBMIT, for one job or many in order.
-- ARGV, eight per job: id, lane, tenant, timeout_ms, reply_ttl_ms, idempotency key, digest of the body, envelope
-- Reply, one per job: {'queued', entry or '', time} {'known', id} {'conflict', id} {'full', length, limit}
-- Sending it twice is harmless: the second run finds job:<id> or done:<id> and answers `known`.
local FIELDS = 8
local WEEK_MS = 7 * DAY_MS
local now = now_ms()
local now_text = text(now)
local call, pcall = redis.call, redis.pcall
local bounds = call('HMGET', KEYS[1], 'max_jobs', 'tenant_max_jobs')
local limit = tonumber(bounds[1]) or 10000
local length = queue_length()
local checks, first_check = {}, text(now + FIRST_CHECK_MS)
local job_prefix, done_prefix, lane_keys = job_key(''), P .. 'done:', {}
for _, lane in ipairs(LANES) do lane_keys[lane] = lane_key(lane) end

local function tenant_room(tenant)
  local own = tonumber(call('HGET', KEYS[1], 'tenant_max_jobs:' .. tenant)) or tonumber(bounds[2])
  if not own then return nil end
  local count = 0
  for _, lane in ipairs(LANES) do
    count = count + (tonumber(call('HGET', tenants_key(lane), tenant)) or 0)
    count = count + call('LLEN', held_key(lane, tenant))
  end
  if count >= own then return {'full', text(count), text(own)} end
end

local function is_known(id) return call('EXISTS', job_prefix .. id, done_prefix .. id) > 0 end

-- A key whose job is gone without an answer (an outage, a flush) blocks nobody.
local function holder_of(dedup, digest)
  local value = call('GET', P .. 'dedup:' .. dedup)
  if not value then return nil end
  local other, other_digest = string.match(value, '^(%S+) ?(.*)$')
  return is_known(other) and {other_digest == digest and 'known' or 'conflict', other}
end

-- What few jobs have.
local function add_to_record(id, tenant, timeout_ms, dedup, digest)
  if tenant ~= '' then call('HSET', job_prefix .. id, 'tenant', tenant) end
  if timeout_ms ~= '' then
    local deadline = text(now + tonumber(timeout_ms))
    call('HSET', job_prefix .. id, 'deadline', deadline)
    call('ZADD', P .. 'deadlines', deadline, id)
  end
  if dedup ~= '' then
    call('HSET', job_prefix .. id, 'dedup', dedup)
    call('SET', P .. 'dedup:' .. dedup, id .. ' ' .. digest, 'PX', text(math.max(WEEK_MS, tonumber(timeout_ms) or 0)))
  end
end

local function submit(id, lane, tenant, timeout_ms, ttl_ms, dedup, digest, envelope)
  if is_known(id) then return {'known', id} end
  local found = dedup ~= '' and holder_of(dedup, digest)
  if found then return found end
  if length >= limit then return {'full', text(length), text(limit)} end
  local waits = false
  if tenant ~= '' then
    local full = tenant_room(tenant)
    if full then return full end
    waits = (tonumber(call('HGET', tenants_key(lane), tenant)) or 0) >= TENANT_WINDOW
  end
  local entry, place = '', 'held'
  if waits then
    call('RPUSH', held_key(lane, tenant), id)
    count_held(lane, 1)
    call('HSET', job_prefix .. id, 'held', envelope)
  else
    entry, place = pcall('XADD', lane_keys[lane], '*', 'id', id, 'job', envelope), 'lane'
    if type(entry) ~= 'string' then entry = add_to_stream(lane_key(lane), 'id', id, 'job', envelope) end
    if tenant ~= '' then call('HINCRBY', tenants_key(lane), tenant, 1) end
  end
  call('HSET', job_prefix .. id, 'at', place, 'lane', lane, 'entry', entry, 'time', now_text, 'ttl', ttl_ms)
  checks[#checks + 1], checks[#checks + 2] = first_check, id
  if tenant ~= '' or timeout_ms ~= '' or dedup ~= '' then add_to_record(id, tenant, timeout_ms, dedup, digest) end
  length = length + 1
  return {'queued', entry, now_text}
end

local out = {}
for i = 1, #ARGV, FIELDS do out[#out + 1] = submit(unpack(ARGV, i, i + FIELDS - 1)) end
-- In one go, and in pieces because unpack has room for some thousands on the stack.
for first = 1, #checks, 1000 do
  call('ZADD', P .. 'checks', unpack(checks, first, math.min(first + 999, #checks)))
end
return out
