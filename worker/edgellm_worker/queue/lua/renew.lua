-- RENEW, every delivery of a worker in one command. ARGV: consumer, liveness_ms, served models, then lane, entry, id, ...
-- Reply: {lost ids, cancelled ids}. Ownership is checked first: a plain XCLAIM would steal back what another took over.
local consumer = ARGV[1]
announce(consumer, ARGV[3], ARGV[2])
local mine, renewed, lost, cancelled = {}, {}, {}, {}
for _, lane in ipairs(LANES) do
  local pending = redis.pcall('XPENDING', lane_key(lane), GROUP, '-', '+', 10000, consumer)
  renewed[lane] = {}
  if not pending.err then
    for _, item in ipairs(pending) do mine[lane .. ' ' .. item[1]] = true end
  end
end
-- No list names us. Either it is somebody else's or answered by now; or it was acknowledged, its consumer or its group
-- removed, all from outside: then it is claimed anew; or it was deleted: then there is nothing left to claim.
local function is_kept(lane, entry, id)
  if redis.call('EXISTS', P .. 'done:' .. id) == 1 or owner(lane, entry) then return false end
  if not is_unclaimed(consumer, entry, id) then return false end
  if has_entry(lane, entry) then
    last_delivered(lane)
    redis.call('XCLAIM', lane_key(lane), GROUP, consumer, 0, entry, 'FORCE', 'JUSTID')
  end
  return true
end

for i = 4, #ARGV, 3 do
  local lane, entry, id = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if mine[lane .. ' ' .. entry] then renewed[lane][#renewed[lane] + 1] = entry
  elseif not is_kept(lane, entry, id) then lost[#lost + 1] = id end
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
