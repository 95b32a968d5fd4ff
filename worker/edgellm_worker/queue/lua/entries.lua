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
