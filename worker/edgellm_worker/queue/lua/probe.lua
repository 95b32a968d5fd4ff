-- What may this user not do here? ARGV, for each command: the number of its words, its words; @ is a key that does not
-- exist. Each is given in a form that changes nothing. Reply: {number of the command, what the server said} where it
-- refused this user, which each version says in its own words.
local REFUSALS = {'the user executing the script', 'permission', 'acl failure'}
local refused, number, first = {}, 0, 1

local function is_refusal(said)
  for _, words in ipairs(REFUSALS) do
    if string.find(string.lower(said), words, 1, true) then return true end
  end
  return false
end

while first <= #ARGV do
  local last, words = first + tonumber(ARGV[first]), {}
  for i = first + 1, last do words[#words + 1] = ARGV[i] == '@' and P .. 'probe' or ARGV[i] end
  local reply = redis.pcall(unpack(words))
  if type(reply) == 'table' and reply.err and is_refusal(reply.err) then refused[#refused + 1] = {number, reply.err} end
  number, first = number + 1, last + 1
end
return refused
