-- RELEASE. ARGV: consumer, uncount (1 takes back the attempt that BEGIN counted), then lane, entry, id, ...
-- The entry stays pending under PARKED with a large idle time: the next take of any worker claims it at once, and the
-- job keeps its place before everything newer. Reply: {number handed back, ids whose entry was deleted from outside}.
-- The caller gives those back by RETRY, with the envelope that it alone still has.
local consumer, released, deleted = ARGV[1], 0, {}
for i = 3, #ARGV, 3 do
  local lane, entry, id = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if holds(consumer, lane, entry, id) then
    if redis.call('HGET', job_key(id), 'begun') == consumer then
      redis.call('HSET', job_key(id), 'begun', '')
      if ARGV[2] == '1' then redis.call('HINCRBY', job_key(id), 'attempt', -1) end
    end
    if has_entry(lane, entry) then
      redis.call('XCLAIM', lane_key(lane), GROUP, PARKED, 0, entry, 'IDLE', 3600000, 'JUSTID')
      released = released + 1
    else
      deleted[#deleted + 1] = id
    end
  end
end
if released > 0 then redis.call('PUBLISH', P .. 'events', 'released') end
return {released, deleted}
