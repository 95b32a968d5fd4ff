-- RETRY. ARGV: consumer, lane, entry, id, delay_ms, alone (0 or 1), kill (0 or 1), uncounted (field to count, or ''),
-- envelope, for an entry that was deleted from outside
-- Reply: 1, or 0 when the caller does not hold the entry any more (a repeat after a lost reply included).
local consumer, lane, entry, id = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local done = redis.call('GET', P .. 'done:' .. id)
if done then
  forget(id, string.match(done, '^(%S+)'))
  drop_entry(lane, entry)
  return 0
end
if not holds(consumer, lane, entry, id) then return 0 end
local found = redis.call('XRANGE', lane_key(lane), entry, entry)[1]
local now = now_ms()
if ARGV[7] == '1' then redis.call('HINCRBY', job_key(id), 'kills', 1) end
if ARGV[8] ~= '' then redis.call('HINCRBY', job_key(id), ARGV[8], 1) end
local job = redis.call('HMGET', job_key(id), 'tenant', 'attempt', 'time')
local header = table.concat({id, lane, job[2] or '0', job[3] or entry_ms(entry)}, ' ')
redis.call('ZADD', P .. 'delayed', text(now + tonumber(ARGV[5])), header .. '\n' .. (found and field(found[2], 'job') or ARGV[9]))
redis.call('HSET', job_key(id), 'at', 'delayed', 'entry', '', 'begun', '')
if ARGV[6] == '1' then redis.call('HSET', job_key(id), 'alone', '1') end
drop_entry(lane, entry)
leave_lane(lane, job[1])
return 1
