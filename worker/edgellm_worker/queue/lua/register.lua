-- ARGV: consumer, liveness_ms, served models. Creates the groups, announces the worker.
-- Reply: {'ok'}, or {'mismatch', another worker, the models it serves} without announcing anything.
local consumer, models = ARGV[1], ARGV[3]
for _, lane in ipairs(LANES) do
  if not last_delivered(lane) then redis.pcall('XGROUP', 'CREATE', lane_key(lane), GROUP, '0', 'MKSTREAM') end
end
for _, other in ipairs(redis.pcall('XINFO', 'CONSUMERS', lane_key('high'), GROUP)) do
  local name = field(other, 'name')
  local serves = redis.call('GET', P .. 'worker:' .. name)
  if serves and serves ~= '' and models ~= '' and serves ~= models then return {'mismatch', name, serves} end
end
redis.pcall('XGROUP', 'CREATECONSUMER', lane_key('high'), GROUP, consumer)
announce(consumer, models, ARGV[2])
return {'ok'}
