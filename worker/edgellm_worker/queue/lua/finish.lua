-- FINISH, DEAD_LETTER and EXPIRE, any number in one command.
-- ARGV: consumer, dead letters kept, then ten per answer: lane, entry, id, status, token, ttl_ms, `done` message, dead reason,
-- envelope for the dead letter, attempts. An empty id has no reply: it is a dead letter alone.
-- Reply, one per answer: 1 when it became the visible one.
local consumer, max_dead, out = ARGV[1], ARGV[2], {}

local function bury(lane, id, reason, envelope, attempts)
  redis.call('XADD', P .. 'dead', 'MAXLEN', '~', max_dead, '*', 'id', id, 'reason', reason, 'lane', lane,
             'attempts', attempts, 'consumer', consumer, 'at', text(now_ms()), 'job', envelope)
end

for i = 3, #ARGV, 10 do
  local lane, entry, id, reason = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 7]
  local visible, is_first, dropped
  if id ~= '' then
    visible, is_first, dropped = answer(id, ARGV[i + 3], ARGV[i + 4], ARGV[i + 6], ARGV[i + 5])
  else
    is_first = #redis.call('XRANGE', lane_key(lane), entry, entry) == 1
    visible = is_first
  end
  if is_first and reason ~= '' then bury(lane, id, reason, ARGV[i + 8], ARGV[i + 9]) end
  if entry ~= '' and entry ~= dropped then drop_entry(lane, entry) end
  out[#out + 1] = visible and 1 or 0
end
return out
