-- ARGV: consumer. A worker that holds nothing and takes nothing more: others need not wait for its liveness to run out.
local consumer = ARGV[1]
for _, lane in ipairs(LANES) do
  local consumers = redis.pcall('XINFO', 'CONSUMERS', lane_key(lane), GROUP)
  for _, one in ipairs(consumers.err and {} or consumers) do
    if field(one, 'name') == consumer and field(one, 'pending') > 0 then return 0 end
  end
end
return redis.call('DEL', P .. 'worker:' .. consumer)
