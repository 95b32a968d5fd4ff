-- Reads only. Reply: {server time, {length, oldest ms or '', pending, held} per lane, delayed, dead}
local lanes = {}
for number, lane in ipairs(LANES) do
  local key = lane_key(lane)
  local head = redis.pcall('XRANGE', key, '-', '+', 'COUNT', 1)[1]
  local oldest = ''
  if head then
    local id = field(head[2], 'id')
    oldest = (id and redis.call('HGET', job_key(id), 'time')) or entry_ms(head[1])
  end
  local pending = redis.pcall('XPENDING', key, GROUP)
  lanes[number] = {lane_length(lane), oldest, pending.err and 0 or pending[1],
                   tonumber(redis.call('HGET', tenants_key(lane), '*')) or 0}
end
return {text(now_ms()), lanes, redis.call('ZCARD', P .. 'delayed'), redis.call('XLEN', P .. 'dead')}
