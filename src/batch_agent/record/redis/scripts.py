"""The Lua scripts of a run in Redis. Each atomic operation is one script.

All scripts get the same keys, in the order of ``KEYS``. The keys of a row's steps are made from a prefix, and share the
hash tag. ``design/cluster.md`` describes the content of each key.
"""

from __future__ import annotations

KEYS = ("run", "feeder", "queue", "rows", "results", "again", "contents", "events")
GROUP = "workers"  # the consumer group of the queue
RETURNED = "returned"  # the consumer that holds returned rows
REPLACED = b"REPLACED"
TAKEN = b"TAKEN"
HELD = b"HELD"

_HEAD = f"""
local run, feeder, queue, rows, results, again, contents, events = unpack(KEYS, 1, 8)
local group = '{GROUP}'
local function replaced(session)
  return redis.call('HGET', run, 'sitting') ~= session
end
local function describe(row)
  local known = row and redis.call('HGET', rows, row)
  if not known then return nil end
  return string.match(known, '^(%d+) (%d+) (%a) (%S+) ?(.*)$')
end
local function keep(row, session, index, state, place, error)
  redis.call('HSET', rows, row, string.format('%s %s %s %s %s', session, index, state, place, error))
end
local function field(entry, name)
  local fields = entry[2]
  for i = 1, #fields, 2 do
    if fields[i] == name then return fields[i + 1] end
  end
end
local function standing()
  local known = redis.call('HMGET', run, 'phase', 'generation', 'ok', 'failed', 'fed', 'observed')
  local pending = redis.call('XPENDING', queue, group)
  local leased = pending[1]
  for _, each in ipairs(pending[4] or {{}}) do
    if each[1] == '{RETURNED}' then leased = leased - tonumber(each[2]) end
  end
  return {{known[1], known[2], redis.call('EXISTS', feeder), redis.call('XLEN', queue) - leased, leased,
          known[3] or '0', known[4] or '0', known[5] or '0', known[6] or '0'}}
end
"""

# facts, fingerprint, resume, lease in ms, what is kept, a number that is unique to this feeder, '1' if the results of
# earlier sessions are dropped, '1' if the feeder has observers, and how samples vote. The results of sessions before
# 'voted', if that is set, come from another vote.
OPEN_FEED = (
    _HEAD
    + """
local facts, fingerprint, resume, lease, kept, nonce, drop, observed, vote = unpack(ARGV)
local before = redis.call('HMGET', run, 'sitting', 'fingerprint', 'facts', 'vote')
local holder = redis.call('GET', feeder)
if holder and string.match(holder, ' (%S+)$') == nonce then
  local latest = redis.call('XREVRANGE', results, '+', '-', 'COUNT', 1)[1]
  return {before[1], redis.call('HGET', run, 'previous') or '', latest and latest[1] or '0-0'}
end
if before[1] and resume == '0' then return 'TAKEN' end
if holder then return {'HELD', redis.call('PTTL', feeder)} end
local session = redis.call('HINCRBY', run, 'sitting', 1)
local votes_anew = before[4] and before[4] ~= vote
if votes_anew then redis.call('HSET', run, 'voted', session) end
if before[2] ~= fingerprint or votes_anew then
  redis.call('HINCRBY', run, 'generation', 1)
  redis.call('DEL', queue)
end
if drop == '1' then redis.call('HSET', run, 'since', session) end
if redis.call('EXISTS', queue) == 0 then
  redis.call('XGROUP', 'CREATE', queue, group, '0', 'MKSTREAM')
end
redis.call('DEL', again, events)
redis.call('HSET', run, 'facts', facts, 'previous', before[3] or '', 'fingerprint', fingerprint, 'lease', lease,
  'keep', kept, 'vote', vote, 'phase', 'running', 'fed', '0', 'ok', '0', 'failed', '0', 'counts', '{}',
  'observed', observed)
redis.call('SET', feeder, session .. ' ' .. nonce, 'PX', lease)
local latest = redis.call('XREVRANGE', results, '+', '-', 'COUNT', 1)[1]
return {tostring(session), before[3] or '', latest and latest[1] or '0-0'}
"""
)

# session, prefix of steps; then for each row that takes over a recorded one: name of the recorded row, its own key,
# its content, '1' if the answer is one to another question. The steps are copied under the name of the new row, which
# is then fed like one that has begun.
ADOPT = (
    _HEAD
    + """
local session, prefix = ARGV[1], ARGV[2]
if replaced(session) then return 'REPLACED' end
for i = 3, #ARGV, 4 do
  local old, key, content, forced = unpack(ARGV, i, i + 3)
  local fed, index, state, place, error = describe(old)
  local row, copies, before = key, 0, string.match(old, '^%x+')
  while describe(row) or redis.call('EXISTS', prefix .. row) == 1 do
    copies = copies + 1
    row = key .. '-' .. copies
  end
  if fed and fed ~= session then
    for _, step in ipairs(redis.call('LRANGE', prefix .. old, 0, -1)) do
      local agent, own, rest = string.match(step, '^(%d+) (%S*) %S* (.*)$')
      if own == before then step = agent .. ' ' .. key .. ' ' .. content .. ' ' .. rest end
      redis.call('RPUSH', prefix .. row, step)
    end
    if redis.call('EXISTS', prefix .. row) == 0 and state ~= 'q' then  -- only its result was kept
      local entry = redis.call('XRANGE', results, place, place)[1]
      if entry then
        local result = field(entry, 'result')
        local at = redis.call('XADD', results, '*', 'row', row, 'index', index, 'sitting', fed, 'result', result)
        keep(row, fed, index, state, at, error)
      end
    end
    if forced == '1' then redis.call('HSET', contents, '=' .. row, 1) end
  end
end
return 1
"""
)

# session, a number that is unique to this feeder
KEEP_FEED = (
    _HEAD
    + """
if replaced(ARGV[1]) then return 'REPLACED' end
local lease, phase = unpack(redis.call('HMGET', run, 'lease', 'phase'))
redis.call('SET', feeder, ARGV[1] .. ' ' .. ARGV[2], 'PX', lease)
local cursor = '0-0'
while phase ~= 'running' do  -- no worker takes rows now, so expired leases are ended here
  cursor = redis.call('XAUTOCLAIM', queue, group, '{RETURNED}', lease, cursor, 'COUNT', 500, 'JUSTID')[1]
  if cursor == '0-0' then break end
end
return standing()
""".replace("{RETURNED}", RETURNED)
)

# session, number of the call, what is retried ('*', or the types between bars), prefix of steps, '1' if rows keep their
# answers by force, '1' if answers that were cut are asked again, '1' if answers are decided again; then for each row:
# index, key, content, value
FEED = (
    _HEAD
    + """
local session, number, retry, prefix, force, cut, decides = unpack(ARGV, 1, 7)
if replaced(session) then return 'REPLACED' end
force = force == '1'
local voted = tonumber(redis.call('HGET', run, 'voted') or '0')
local function retried(state, error)
  return state == 'f' and (retry == '*' or string.find(retry, '|' .. error .. '|', 1, true))
end
local function add(row, index, value, ended)
  if redis.call('EXISTS', prefix .. row) == 1 then
    local past = force and (ended and 'ended' or 'forced') or 'checked'
    return redis.call('XADD', queue, '*', 'row', row, 'index', index, 'value', value, 'past', past)
  end
  return redis.call('XADD', queue, '*', 'row', row, 'index', index, 'value', value)
end
local function drop(place)
  redis.call('XACK', queue, group, place)
  redis.call('XDEL', queue, place)
end
-- The rows with one content: field C has the first, C:1 and so on the next, C# their number without the first.
local function remember(content, row)
  if redis.call('HSETNX', contents, content, row) == 0 then
    redis.call('HSET', contents, content .. ':' .. redis.call('HINCRBY', contents, content .. '#', 1), row)
  end
end
-- Return the field of the newest row of earlier sessions with this content that was not fed again. Each is found once.
local function earlier(content)
  local last = redis.call('HGET', again, content .. ':') or redis.call('HGET', contents, content .. '#') or '0'
  for n = tonumber(last), 0, -1 do
    local at = n > 0 and content .. ':' .. n or content
    local row = redis.call('HGET', contents, at)
    local fed = row and describe(row)
    if fed and fed ~= session then
      redis.call('HSET', again, content .. ':', n - 1)
      return at, row
    end
  end
  redis.call('HSET', again, content .. ':', -1)
end
local answers = {}
for i = 8, #ARGV, 4 do
  local index, key, content, value = unpack(ARGV, i, i + 3)
  local row, copies, answer = key, 0, false
  while true do
    local fed, at, state, place, error = describe(row)
    if not fed then
      local slot, old = nil, nil
      if force then slot, old = earlier(content) end
      if not old then
        remember(content, row)
        keep(row, session, index, 'q', add(row, index, value), '')
        break
      end
      redis.call('HSET', contents, slot, row)
      local _, _, was, from, why = describe(old)
      local ended = was ~= 'q' and not retried(was, why)
      if ended and was == 'k' then redis.call('HSET', contents, '=' .. row, 1) end
      if redis.call('EXISTS', prefix .. old) == 1 then
        redis.call('COPY', prefix .. old, prefix .. row)
        if not ended then redis.call('HSET', contents, '=' .. row, 2) end  -- it continues under another question
      elseif ended then  -- only its result was kept
        local entry = redis.call('XRANGE', results, from, from)[1]
        if entry then
          answer = field(entry, 'result')
          redis.call('HINCRBY', run, was == 'k' and 'ok' or 'failed', 1)
          keep(row, session, index, was, from, why)
          break
        end
      end
      keep(row, session, index, 'q', add(row, index, value, ended), '')
      break
    elseif fed == session and at == index then  -- a repeated call: its first answer was lost
      if state ~= 'q' then
        local entry = redis.call('XRANGE', results, place, place)[1]
        if entry and field(entry, 'sitting') ~= session then answer = field(entry, 'result') end
      end
      break
    elseif fed ~= session then
      local entry = nil
      local mark = not force and redis.call('HGET', contents, '=' .. row)
      if mark then  -- its answer is one to another question, or to several (2): then the worker starts it again
        redis.call('HDEL', contents, '=' .. row)
        if mark == '1' then redis.call('DEL', prefix .. row) end
        if state == 'q' then drop(place) end
        state, place, error = 'q', add(row, index, value), ''
      elseif state == 'q' then
        local waiting = redis.call('XRANGE', queue, place, place)[1]
        local past = waiting and field(waiting, 'past')
        if force or at ~= index or not waiting or past == 'forced' or past == 'ended' then
          drop(place)
          place = add(row, index, value)
        end
      else
        entry = not retried(state, error) and redis.call('XRANGE', results, place, place)[1]
        if decides == '1' and state == 'k' and redis.call('EXISTS', prefix .. row) == 1 then entry = nil end
        if entry and cut == '1' and state == 'k' then
          local line = string.match(field(entry, 'result'), '[^\\n]+')
          if cjson.decode(line).truncated then entry = nil end
        end
        if entry and tonumber(field(entry, 'sitting')) < voted and redis.call('EXISTS', prefix .. row) == 1 then
          entry = nil  -- its samples vote again
        end
        if entry then
          answer = field(entry, 'result')
          redis.call('HINCRBY', run, state == 'k' and 'ok' or 'failed', 1)
        else
          state, place, error = 'q', add(row, index, value), ''
        end
      end
      keep(row, session, index, state, place, error)
      break
    end
    copies = copies + 1
    if copies == 1 then  -- many rows may have the same key: continue after those of earlier calls
      local known = redis.call('HGET', again, key)
      local of, before, now = string.match(known or '', '^(%d+) (%d+) (%d+)$')
      if of then copies = math.max(1, tonumber(of == number and before or now)) end
    end
    row = key .. '-' .. copies
  end
  if copies > 0 then
    local of, before, now = string.match(redis.call('HGET', again, key) or '', '^(%d+) (%d+) (%d+)$')
    if of ~= number then before = now or '0' end
    redis.call('HSET', again, key, string.format('%s %s %d', number, before, copies + 1))
  end
  answers[#answers + 1] = answer
end
return answers
"""
)

# session
END_INPUTS = (
    _HEAD
    + """
local session = ARGV[1]
if replaced(session) then return 'REPLACED' end
local start = '-'
while session ~= '1' do
  local page = redis.call('XRANGE', queue, start, '+', 'COUNT', 500)
  if #page == 0 then break end
  for _, entry in ipairs(page) do
    local row = field(entry, 'row')
    if describe(row) ~= session then
      redis.call('XACK', queue, group, entry[1])
      redis.call('XDEL', queue, entry[1])
    end
    start = '(' .. entry[1]
  end
end
redis.call('HSET', run, 'fed', '1')
return 'OK'
"""
)

# session, then fields and values of the run
WRITE = (
    _HEAD
    + """
if replaced(ARGV[1]) then return 'REPLACED' end
redis.call('HSET', run, unpack(ARGV, 2))
return 'OK'
"""
)

# session, facts, phase
CLOSE_FEED = (
    _HEAD
    + """
if replaced(ARGV[1]) then return 'REPLACED' end
redis.call('HSET', run, 'facts', ARGV[2], 'phase', ARGV[3], 'observed', '0')
redis.call('DEL', feeder, events)
return 'OK'
"""
)

# session, the first position to return, the most entries
EVENTS = (
    _HEAD
    + """
if replaced(ARGV[1]) then return 'REPLACED' end
redis.call('XTRIM', events, 'MINID', ARGV[2])
return redis.call('XRANGE', events, ARGV[2], '+', 'COUNT', ARGV[3])
"""
)

STANDING = _HEAD + "return standing()"

# ``give`` takes entries of the queue for a worker. An entry that is no waiting row of the run was not put there by a
# feeder: it is dropped and counted.
_GIVE = """
local taken, dropped = {}, 0
local function give(entries, prefix)
  for _, entry in ipairs(entries) do
    local row = field(entry, 'row')
    local _, index, state, place = describe(row)
    if state == 'q' and place == entry[1] and index == field(entry, 'index') and field(entry, 'value') then
      local token = redis.call('XPENDING', queue, group, place, place, 1)[1][4]
      local steps = {}
      if token > 1 or field(entry, 'past') then steps = redis.call('LRANGE', prefix .. row, 0, -1) end
      local past = field(entry, 'past') or ''
      taken[#taken + 1] = {place, token, row, index, field(entry, 'value'), steps, past}
    else
      redis.call('XACK', queue, group, entry[1])
      redis.call('XDEL', queue, entry[1])
      redis.call('HINCRBY', run, 'forged', 1)
      dropped = dropped + 1
    end
  end
end
"""

# prefix of steps, then the places of entries that a worker has just read
GIVE = (
    _HEAD
    + _GIVE
    + """
for i = 2, #ARGV do give(redis.call('XRANGE', queue, ARGV[i], ARGV[i]), ARGV[1]) end
return {taken, dropped}
"""
)

# worker, count, prefix of steps, whether to look for expired leases, and the minimum uptime of the server in ms
TAKE = (
    _HEAD
    + _GIVE
    + f"""
local worker, count, prefix, look, age = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], tonumber(ARGV[5])
local back = redis.call('XPENDING', queue, group, '-', '+', count, '{RETURNED}')
if #back > 0 then
  local ids = {{}}
  for i, each in ipairs(back) do ids[i] = each[1] end
  give(redis.call('XCLAIM', queue, group, worker, 0, unpack(ids)), prefix)
end
if look == '1' and #taken < count then
  local lease = redis.call('HGET', run, 'lease')
  local up = string.match(redis.call('INFO', 'server'), 'uptime_in_seconds:(%d+)')
  local cursor = '0-0'
  while tonumber(up) * 1000 >= age and #taken < count do
    local found = redis.call('XAUTOCLAIM', queue, group, worker, lease, cursor, 'COUNT', count - #taken)
    cursor = found[1]
    give(found[2], prefix)
    if cursor == '0-0' then break end
  end
end
if #taken < count then
  local read = redis.call('XREADGROUP', 'GROUP', group, worker, 'COUNT', count - #taken, 'STREAMS', queue, '>')
  if read then give(read[1][2], prefix) end
end
return {{taken, dropped}}
"""
)

# worker, then for each lease: place, token
RENEW = (
    _HEAD
    + """
local worker, mine, held, lost = ARGV[1], {}, {}, {}
local start = '-'
while true do
  local page = redis.call('XPENDING', queue, group, start, '+', 1000, worker)
  for _, each in ipairs(page) do mine[each[1]] = each[4] end
  if #page < 1000 then break end
  start = '(' .. page[#page][1]
end
for i = 2, #ARGV, 2 do
  if mine[ARGV[i]] == tonumber(ARGV[i + 1]) then held[#held + 1] = ARGV[i] else lost[#lost + 1] = ARGV[i] end
end
for i = 1, #held, 500 do
  local ids = {unpack(held, i, math.min(i + 499, #held))}
  ids[#ids + 1] = 'JUSTID'
  redis.call('XCLAIM', queue, group, worker, 0, unpack(ids))
end
return {lost, standing()}
"""
)

# worker, key of the worker, number of the commit, prefix of steps, and its increment: tokens, cost, counts as JSON or
# '', events or ''; then for each row: place, token, row, result or '', error, number of steps, steps
COMMIT = (
    _HEAD
    + """
local worker, own, number, prefix, tokens, cost, counts, happened = unpack(ARGV, 1, 8)
local last = redis.call('HMGET', own, 'commit', 'lost')
if last[1] == number then return cjson.decode(last[2]) end
local session, kept, observed = unpack(redis.call('HMGET', run, 'sitting', 'keep', 'observed'))
local lost = {}
local i = 9
while i <= #ARGV do
  local place, token, row, result, error, count = unpack(ARGV, i, i + 5)
  local first = i + 6
  i = first + tonumber(count)
  local held = redis.call('XPENDING', queue, group, place, place, 1)[1]
  if not held or held[2] ~= worker or held[4] ~= tonumber(token) then
    lost[#lost + 1] = place
  else
    for from = first, i - 1, 500 do
      redis.call('RPUSH', prefix .. row, unpack(ARGV, from, math.min(from + 499, i - 1)))
    end
    if result ~= '' then
      local fed, index = describe(row)
      local state = error == '' and 'k' or 'f'
      local at = redis.call('XADD', results, '*', 'row', row, 'index', index, 'sitting', fed, 'result', result)
      keep(row, fed, index, state, at, error)
      redis.call('XACK', queue, group, place)
      redis.call('XDEL', queue, place)
      if kept == 'results' and error == '' then redis.call('DEL', prefix .. row) end
      if fed == session then redis.call('HINCRBY', run, error == '' and 'ok' or 'failed', 1) end
    end
  end
end
if session then  -- else the run was deleted, and the key would stay forever
  redis.call('HSET', own, 'commit', number, 'lost', #lost > 0 and cjson.encode(lost) or '[]')
  if tokens ~= '0' then redis.call('HINCRBY', run, 'tokens', tokens) end
  if cost ~= '0' then redis.call('HINCRBY', run, 'cost', cost) end
  if counts ~= '' then
    local sum = cjson.decode(redis.call('HGET', run, 'counts') or '{}')
    for name, count in pairs(cjson.decode(counts)) do sum[name] = (sum[name] or 0) + count end
    redis.call('HSET', run, 'counts', cjson.encode(sum))
  end
  if happened ~= '' and observed == '1' then redis.call('XADD', events, '*', 'lines', happened) end
end
return lost
"""
)

# Returns the number of a new worker; 0 if there is no run.
JOIN = (
    _HEAD
    + """
if redis.call('EXISTS', run) == 0 then return 0 end
return redis.call('HINCRBY', run, 'workers', 1)
"""
)

# worker, then for each lease: place, token
HAND_BACK = (
    _HEAD
    + f"""
for i = 2, #ARGV, 2 do
  local held = redis.call('XPENDING', queue, group, ARGV[i], ARGV[i], 1)[1]
  if held and held[2] == ARGV[1] and held[4] == tonumber(ARGV[i + 1]) then
    redis.call('XCLAIM', queue, group, '{RETURNED}', 0, ARGV[i])
  end
end
return 'OK'
"""
)

# worker, key of the worker
LEAVE = (
    _HEAD
    + """
if #redis.call('XPENDING', queue, group, '-', '+', 1, ARGV[1]) == 0 then  -- else its rows would be lost
  redis.call('XGROUP', 'DELCONSUMER', queue, group, ARGV[1])
end
redis.call('DEL', ARGV[2])
return 'OK'
"""
)
