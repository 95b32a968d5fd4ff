-- DELTA. ARGV: consumer, then lane, entry, id, ttl_ms, delta, ...   Reply, one per delta: 1 written, 0 not the owner.
local consumer, out = ARGV[1], {}
for i = 2, #ARGV, 5 do
  local id = ARGV[i + 2]
  local written = 0
  if redis.call('EXISTS', P .. 'done:' .. id) == 0 and holds(consumer, ARGV[i], ARGV[i + 1], id) then
    add_to_reply(id, 'delta', ARGV[i + 4], ARGV[i + 3])
    written = 1
  end
  out[#out + 1] = written
end
return out
