-- RENEW, every delivery of a worker in one command. ARGV: consumer, liveness_ms, served models, then lane, entry, id, ...
-- Reply: {lost ids, cancelled ids}. Ownership is checked first: a plain XCLAIM would steal back what another took over.
local consumer = ARGV[1]
redis.call('SET', P .. 'worker:' .. consumer, ARGV[3], 'PX', ARGV[2])
local mine, renewed, lost, cancelled = {}, {}, {}, {}
for _, lane in ipairs(LANES) do
  local pending = redis.pcall('XPENDING', lane_key(lane), GROUP, '-', '+', 10000, consumer)
  renewed[lane] = {}
  if not pending.err then
    for _, item in ipairs(pending) do mine[lane .. ' ' .. item[1]] = true end
  end
end
for i = 4, #ARGV, 3 do
  local lane, entry, id = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if mine[lane .. ' ' .. entry] then renewed[lane][#renewed[lane] + 1] = entry else lost[#lost + 1] = id end
  if redis.call('EXISTS', P .. 'cancel:' .. id) == 1 then cancelled[#cancelled + 1] = id end
end
for _, lane in ipairs(LANES) do
  for first = 1, #renewed[lane], 1000 do
    local args = {lane_key(lane), GROUP, consumer, 0}
    for i = first, math.min(first + 999, #renewed[lane]) do args[#args + 1] = renewed[lane][i] end
    args[#args + 1] = 'JUSTID'
    redis.call('XCLAIM', unpack(args))
  end
end
return {lost, cancelled}
