-- CANCEL. ARGV: id, the `done` message to write when the job is not running
-- Reply: {'cancelled'} answered here; {'requested'} its worker will; {'done', status}; {'unknown'}
local id, payload = ARGV[1], ARGV[2]
local done = redis.call('GET', P .. 'done:' .. id)
if done then return {'done', string.match(done, '^(%S+)')} end
local job = redis.call('HMGET', job_key(id), 'at', 'lane', 'entry', 'ttl')
if not job[1] then return {'unknown'} end
if job[1] == 'lane' then
  local holder = owner(job[2], job[3])
  if holder and holder ~= PARKED then
    redis.call('SET', P .. 'cancel:' .. id, '1', 'PX', DAY_MS)
    redis.call('PUBLISH', P .. 'events', 'cancel ' .. id)
    return {'requested'}
  end
end
answer(id, 'cancelled', 'cancel', payload, job[4] or '3600000')
return {'cancelled'}
