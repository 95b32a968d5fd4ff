-- TAKE, for an entry whose job:<id> is missing: written by a bare XADD, or its hash was lost.
-- ARGV: lane, entry, id, time, tenant, deadline, ttl_ms, dedup   Reply: the row, or nil when there is nothing to do.
local lane, entry, id = ARGV[1], ARGV[2], ARGV[3]
local fields = {'at', 'lane', 'lane', lane, 'entry', entry, 'time', ARGV[4], 'ttl', ARGV[7]}
if redis.call('EXISTS', job_key(id), P .. 'done:' .. id) == 0 then
  if ARGV[5] ~= '' then
    fields[#fields + 1] = 'tenant'; fields[#fields + 1] = ARGV[5]
    redis.call('HINCRBY', tenants_key(lane), ARGV[5], 1)
  end
  if ARGV[6] ~= '' then
    fields[#fields + 1] = 'deadline'; fields[#fields + 1] = ARGV[6]
    redis.call('ZADD', P .. 'deadlines', ARGV[6], id)
  end
  redis.call('HSET', job_key(id), unpack(fields))
  check_later(id, now_ms(), 0)
end
return delivery_row(lane, entry, {'id', id, 'job', ''})
