-- Shared by every script of a queue. KEYS[1] is always the queue's `config` key: it routes the script to the right
-- node, and every other key is derived from it, so that all of them carry the same hash tag.
-- Streams are read as (field, value, ...) lists; numbers travel as text, because Lua prints large ones in exponents.
local P = string.sub(KEYS[1], 1, -7)
local GROUP = 'workers'
local PARKED = 'parked'       -- the consumer that holds what a draining worker handed back
local LANES = {'high', 'normal', 'low'}
local TENANT_WINDOW = 64      -- lane entries per tenant; the rest waits in held:<lane>:<tenant>
local DAY_MS = 86400000
local FIRST_CHECK_MS = 60000

local function text(number) return string.format('%.0f', number) end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function lane_key(lane) return P .. 'jobs:' .. lane end
local function job_key(id) return P .. 'job:' .. id end
local function tenants_key(lane) return P .. 'tenants:' .. lane end
local function held_key(lane, tenant) return P .. 'held:' .. lane .. ':' .. tenant end

local function is_set(value) return value and value ~= '' end

-- XADD. Whatever else lies under the key of a stream was put there by a stranger: it goes. Any other refusal stands.
local function add_to_stream(key, ...)
  local entry = redis.pcall('XADD', key, '*', ...)
  if type(entry) == 'table' and entry.err then
    local kind_there = redis.call('TYPE', key).ok
    if kind_there ~= 'stream' and kind_there ~= 'none' then redis.call('DEL', key) end
    entry = redis.call('XADD', key, '*', ...)
  end
  return entry
end

-- A lane whose key is no stream holds nothing; it stops no other lane.
local function lane_length(lane)
  local length = redis.pcall('XLEN', lane_key(lane))
  return type(length) == 'number' and length or 0
end

-- Everything that waits or runs: lanes hold their entries in flight too, as finishing deletes them.
local function queue_length()
  local total = redis.call('ZCARD', P .. 'delayed')
  for _, lane in ipairs(LANES) do total = total + lane_length(lane) end
  if redis.call('EXISTS', tenants_key('high'), tenants_key('normal'), tenants_key('low')) > 0 then
    for _, lane in ipairs(LANES) do
      total = total + (tonumber(redis.call('HGET', tenants_key(lane), '*')) or 0)
    end
  end
  return total
end

-- The consumer that holds an entry, or nil. A missing stream or group means that nobody does.
local function owner(lane, entry)
  if not is_set(entry) then return nil end
  local found = redis.pcall('XPENDING', lane_key(lane), GROUP, entry, entry, 1)
  if found.err or #found == 0 then return nil end
  return found[1][2]
end

local function count_held(lane, change)
  if redis.call('HINCRBY', tenants_key(lane), '*', change) <= 0 then redis.call('HDEL', tenants_key(lane), '*') end
end

local function enter_lane(lane, id, tenant, payload)
  local entry = add_to_stream(lane_key(lane), 'id', id, 'job', payload)
  redis.call('HSET', job_key(id), 'at', 'lane', 'lane', lane, 'entry', entry)
  if is_set(tenant) then redis.call('HINCRBY', tenants_key(lane), tenant, 1) end
  return entry
end

-- An entry of this tenant left the lane: its next held job takes the place. A tenant is held back by its own window
-- only, so giving the place to the same tenant is what keeps the tenants' turns equal.
local function leave_lane(lane, tenant)
  if not is_set(tenant) then return end
  local count = redis.call('HINCRBY', tenants_key(lane), tenant, -1)
  while count < TENANT_WINDOW do
    local id = redis.call('LPOP', held_key(lane, tenant))
    if not id then break end
    count_held(lane, -1)
    local payload = redis.call('HGET', job_key(id), 'held')
    if payload then
      redis.call('HDEL', job_key(id), 'held')
      enter_lane(lane, id, tenant, payload)
      count = count + 1
    end
  end
  if count <= 0 then redis.call('HDEL', tenants_key(lane), tenant) end
end

local function has_entry(lane, entry)
  return is_set(entry) and #redis.pcall('XRANGE', lane_key(lane), entry, entry) > 0
end

-- When the sweep looks whether a job is still where its record says (sweep.lua): after a minute, then at twice that age.
local function check_later(id, now, age_ms)
  redis.call('ZADD', P .. 'checks', text(now + math.max(FIRST_CHECK_MS, age_ms)), id)
end

local function drop_entry(lane, entry)
  redis.pcall('XACK', lane_key(lane), GROUP, entry)
  redis.pcall('XDEL', lane_key(lane), entry)
end

-- A member of `delayed` is one header line of words, then the envelope: it outlives the loss of job:<id>.
local function delayed_members(id)
  local members, cursor = {}, '0'
  repeat
    local page = redis.call('ZSCAN', P .. 'delayed', cursor, 'MATCH', id .. ' *', 'COUNT', 1000)
    cursor = page[1]
    for i = 1, #page[2], 2 do members[#members + 1] = page[2][i] end
  until cursor == '0'
  return members
end

local function drop_delayed(id)
  for _, member in ipairs(delayed_members(id)) do redis.call('ZREM', P .. 'delayed', member) end
end

-- Remove every trace of a job but its answer. Returns the entry that went with it, if there was one.
local function forget(id, status)
  local job = redis.call('HMGET', job_key(id), 'at', 'lane', 'entry', 'tenant', 'dedup', 'deadline')
  local at, lane, entry, tenant, dedup, deadline = job[1], job[2], job[3], job[4], job[5], job[6]
  if at == 'lane' then
    drop_entry(lane, entry)
    leave_lane(lane, tenant)
  elseif at == 'held' then
    redis.call('LREM', held_key(lane, tenant), 1, id)
    count_held(lane, -1)
  elseif at == 'delayed' then
    drop_delayed(id)
  end
  if is_set(deadline) then redis.call('ZREM', P .. 'deadlines', id) end
  redis.call('ZREM', P .. 'checks', id)
  if is_set(dedup) then
    local value = redis.call('GET', P .. 'dedup:' .. dedup)
    if value and string.match(value, '^(%S+)') == id then
      if status == 'ok' then redis.call('PEXPIRE', P .. 'dedup:' .. dedup, DAY_MS)
      else redis.call('DEL', P .. 'dedup:' .. dedup) end
    end
  end
  redis.call('DEL', job_key(id), P .. 'cancel:' .. id)
  return at == 'lane' and entry or nil
end

local function add_to_reply(id, kind, payload, ttl_ms)
  add_to_stream(P .. 'reply:' .. id, kind, payload)
  redis.call('PEXPIRE', P .. 'reply:' .. id, ttl_ms)
end

-- The fence. The first answer becomes visible, whoever gives it. Returns whether this one is visible (true also when its
-- sender repeats itself), whether it became so now, and the entry that went with the job.
-- The reply is written before the fence: a refused write (out of memory, wrong type) leaves the job unanswered.
local function answer(id, status, token, payload, ttl_ms)
  local value = status .. ' ' .. token
  local done = redis.call('GET', P .. 'done:' .. id)
  if done then
    local entry = forget(id, string.match(done, '^(%S+)'))
    return done == value, false, entry
  end
  add_to_reply(id, 'done', payload, ttl_ms)
  redis.call('SET', P .. 'done:' .. id, value, 'NX', 'PX', text(math.max(DAY_MS, tonumber(ttl_ms) + 3600000)))
  return true, true, forget(id, status)
end
