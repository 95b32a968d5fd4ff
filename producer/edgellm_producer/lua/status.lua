-- Reads only. ARGV: id, ...   Reply, one per id: {state, attempt, enqueued at ms, status, 1 when the reply is kept}
-- state: queued, running, delayed, done, unknown
local out = {}
for i, id in ipairs(ARGV) do
  local done = redis.call('GET', P .. 'done:' .. id)
  local job = redis.call('HMGET', job_key(id), 'at', 'attempt', 'time', 'begun')
  if done then
    out[i] = {'done', '0', '0', string.match(done, '^(%S+)'), redis.call('EXISTS', P .. 'reply:' .. id)}
  elseif job[1] then
    local state = 'queued'
    if job[1] == 'delayed' then state = 'delayed' elseif is_set(job[4]) then state = 'running' end
    out[i] = {state, job[2] or '0', job[3] or '0', '', 0}
  else
    out[i] = {'unknown', '0', '0', '', 0}
  end
end
return out
