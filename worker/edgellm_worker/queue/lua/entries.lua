-- Shared by the scripts that read lanes.
local function field(fields, name)
  for i = 1, #fields, 2 do if fields[i] == name then return fields[i + 1] end end
end

-- The id up to which the lane was delivered; nil when the stream does not exist. A missing group is made at 0, so that
-- what was enqueued before it (or before a flush took it away) is delivered too.
local function last_delivered(lane)
  local groups = redis.pcall('XINFO', 'GROUPS', lane_key(lane))
  if groups.err then return nil end
  for _, group in ipairs(groups) do
    if field(group, 'name') == GROUP then return field(group, 'last-delivered-id') end
  end
  redis.call('XGROUP', 'CREATE', lane_key(lane), GROUP, '0')
  return '0-0'
end

local function entry_ms(entry) return string.match(entry, '^(%d+)') end

-- A worker says that it lives, for two of its leases. Workers may have leases of different length: nobody takes over
-- before the longest of them, or a short one would take what a long one is about to renew.
local function announce(consumer, models, liveness_ms)
  redis.call('SET', P .. 'worker:' .. consumer, models, 'PX', liveness_ms)
  local lease_ms = tonumber(liveness_ms) / 2
  if lease_ms >= (tonumber(redis.call('GET', P .. 'lease')) or 0) then
    redis.call('SET', P .. 'lease', text(lease_ms), 'PX', liveness_ms)
  end
end

-- Is a job that no pending list gives to anybody the caller's? It is unless another began it, or it has another entry.
local function is_unclaimed(consumer, entry, id)
  local job = redis.call('HMGET', job_key(id), 'begun', 'entry')
  return (not is_set(job[1]) or job[1] == consumer) and (not job[2] or job[2] == entry)
end

-- May the caller go on with what it has in hand? As a rule the pending list says so. An entry that was deleted from
-- outside (XDEL, XTRIM, a flush) is soon in no list: its job stays with who has it in hand, as nobody else can get it.
local function holds(consumer, lane, entry, id)
  local holder = owner(lane, entry)
  if holder then return holder == consumer end
  return not has_entry(lane, entry) and is_unclaimed(consumer, entry, id)
end

-- What the worker must know of an entry it now holds; nil when there is nothing to do for it: the job is answered
-- already (a failover can bring entries back), or this is a second entry of a job that has another.
local function delivery_row(lane, entry, fields)
  local id, envelope = field(fields, 'id'), field(fields, 'job')
  if not id then return {lane, entry, '', envelope or '', entry_ms(entry), '0', '0', '', '', '', 0, 0, '0'} end
  local flags = redis.call('MGET', P .. 'done:' .. id, P .. 'cancel:' .. id)
  if flags[1] then
    forget(id, string.match(flags[1], '^(%S+)'))
    drop_entry(lane, entry)
    return nil
  end
  local job = redis.call('HMGET', job_key(id), 'entry', 'time', 'attempt', 'kills', 'alone', 'deadline', 'ttl', 'at',
                         'newer')
  if is_set(job[1]) and job[1] ~= entry then
    drop_entry(lane, entry)
    return nil
  end
  return {lane, entry, id, envelope or '', job[2] or entry_ms(entry), job[3] or '0', job[4] or '0', job[5] or '',
          job[6] or '', job[7] or '', flags[2] and 1 or 0, job[8] and 1 or 0, job[9] or '0'}
end
